"""Jinja as all templates of the kit use it (`templates/`)."""

from __future__ import annotations

import functools

import jinja2

from dsv4kit import quoting
from dsv4kit.config.paths import ROOT


@functools.cache  # with it a template is compiled once, and not for each segment
def environment() -> jinja2.Environment:
    """An unknown variable is an error, never an empty text; a line with a tag alone leaves nothing behind."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"shell": quoting.shell, "sbatch": quoting.sbatch}
    return made
