"""A report as HTML, Markdown or JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

from dsv4kit.errors import UserError
from dsv4kit.report.figures import Figure, comparison, figures
from dsv4kit.report.gather import RunFacts
from dsv4kit.report.summary import Table, differences, sentences, tables
from dsv4kit.run.directory import RunDir
from dsv4kit.run.files import write_text

TEMPLATE = "report.html.j2"


def as_html(facts: RunFacts) -> str:
    """One page that needs no network: plotly.js, data and text in one file."""
    return _page(facts.run, facts, list(sentences(facts)), figures(facts), tables(facts))


def comparison_as_html(one: RunFacts, other: RunFacts) -> str:
    """Two runs on one page."""
    lines = [f"{facts.run}: {line}" for facts in (one, other) for line in sentences(facts)]
    return _page(f"{one.run} and {other.run}", one, lines, comparison(one, other), [differences(one, other)])


def _page(title: str, facts: RunFacts, lines: Sequence[str], drawn: Sequence[Figure], shown: Sequence[Table]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from dsv4kit.config.paths import ROOT

    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("plotly: not installed; `make setup` installs it, and --format md needs none") from None
    # Everything that is put in is text, whatever it holds.
    made = Environment(loader=FileSystemLoader(ROOT / "templates"), autoescape=True, undefined=StrictUndefined)
    return made.get_template(TEMPLATE).render(
        title=title,
        directory=facts.directory,
        made=time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.made)),
        sentences=lines,
        figures=drawn,
        tables=shown,
        specs=_in_a_script({figure.key: figure.spec for figure in drawn if figure.spec}),
        plotly=get_plotlyjs(),
    )


def _in_a_script(content: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def as_markdown(facts: RunFacts) -> str:
    """Sentences and tables."""
    return _markdown(facts.run, list(sentences(facts)), tables(facts))


def comparison_as_markdown(one: RunFacts, other: RunFacts) -> str:
    """What two runs have otherwise."""
    lines = [f"{facts.run}: {line}" for facts in (one, other) for line in sentences(facts)]
    return _markdown(f"{one.run} and {other.run}", lines, [differences(one, other)])


def _markdown(title: str, lines: Sequence[str], shown: Sequence[Table]) -> str:
    parts = [f"# {_cell(title)}", "", *(f"- {_cell(line)}" for line in lines)]
    for name, columns, rows in shown:
        parts += ["", f"## {name}", "", f"| {' | '.join(map(_cell, columns))} |", f"|{'---|' * len(columns)}"]
        parts += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(parts) + "\n"


def _cell(text: str) -> str:
    for letter in "\\`*_[]<>|":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())


def as_json(facts: RunFacts) -> str:
    """Everything in it but the samples."""
    return json.dumps(_finite(facts.as_dict()), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def keep(run: RunDir, text: str) -> None:
    """Puts the HTML where everybody looks for it."""
    write_text(run.report_file, text)
