"""Text tables: columns as wide as their widest cell, two spaces between them, nothing at the end of a line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Sequence

# Of a terminal: what it would obey instead of showing it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_COLOURS = {
    **dict.fromkeys(("finished", "completed", "COMPLETED"), "32"),
    **dict.fromkeys(("running", "RUNNING"), "36"),
    **dict.fromkeys(("waiting", "PENDING", "incomplete", "cancelled", "CANCELLED"), "33"),
    **dict.fromkeys(("stopped", "damaged", "FAILED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY"), "31"),
}


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), most: int | None = None) -> list[str]:
    """A line per row; columns numbered in `right` are right-justified, the others left.

    `most` bounds the width that is made room for: a longer cell pushes its own line only. All rows have equally many
    cells.
    """
    columns = range(len(rows[0]) if rows else 0)
    widths = [max(len(row[column]) for row in rows) for column in columns]
    if most is not None:
        widths = [min(width, most) for width in widths]
    return ["  ".join(_cell(row[i], widths[i], i in right) for i in columns).rstrip() for row in rows]


def _cell(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def plain(text: str) -> str:
    """The text with nothing in it that a terminal would obey; what was there stands as `\\x1b`."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def terminal_width() -> int | None:
    """Columns of the terminal that reads this; None where none does, and lines are left as long as they are."""
    if not sys.stdout.isatty():
        return None
    try:
        return max(40, os.get_terminal_size(sys.stdout.fileno()).columns)
    except OSError:
        return 80


def coloured(text: str) -> str:
    """The states in the text in colours, on a terminal that has some (NO_COLOR, TERM=dumb: none)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return text
    words = "|".join(sorted(_COLOURS, key=len, reverse=True))
    return re.sub(rf"\b({words})\b", lambda found: f"\x1b[{_COLOURS[found[1]]}m{found[1]}\x1b[0m", text)


def wrapped(line: str, width: int | None, indent: str = "    ") -> list[str]:
    """The line in pieces of at most `width` columns, those after the first indented."""
    if width is None or len(line) <= width:
        return [line]
    import textwrap

    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [line]


def duration(seconds: float) -> str:
    """A length of time as people say it: 45 s, 12 min, 3 h 20 min, 4 d 6 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
