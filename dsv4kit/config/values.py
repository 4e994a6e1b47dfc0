"""Reading the text of one override: `key=value`, as typed after `SET=` or `VERL=`."""

from __future__ import annotations

import re
import shlex
from typing import Any

from dsv4kit.errors import UserError

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_\-./@]*\Z")
_SCALAR = re.compile(r"(true|false|null|[-+]?\d+|[-+]?(\d+\.\d*|\.?\d+)([eE][-+]?\d+)?)\Z", re.IGNORECASE)


def split_words(text: str, variable: str) -> list[str]:
    """The overrides in one make variable: separated by spaces, with shell quotes around what holds spaces."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(
            f"{variable}={text!r}: {str(error).lower()}; put quotes around a value that holds spaces"
        ) from None


def split_pair(text: str, variable: str) -> tuple[str, str]:
    """`key=value` as a pair of texts; everything after the first `=` is the value."""
    key, equals, value = text.partition("=")
    if not equals or not _KEY.match(key):
        raise UserError(f"{variable}: {text!r} is not of the form key=value")
    return key, value


def parse_value(text: str) -> Any:
    """A number, boolean, null, list or mapping where the text is plainly one, else the text itself, unchanged.

    YAML decides, but only for what cannot be meant as text: `a: b`, `~`, `yes` and dates stay strings.
    """
    import yaml

    stripped = text.strip()
    if _SCALAR.match(stripped):
        value = yaml.safe_load(stripped.lower())
        return float(value) if isinstance(value, str) else value  # YAML 1.1 reads 1e-3 as text
    if stripped[:1] in ("[", "{") and stripped[-1:] in ("]", "}"):
        try:
            value = yaml.safe_load(stripped)
        except yaml.YAMLError:
            return text
        return value if isinstance(value, list | dict) else text
    return text
