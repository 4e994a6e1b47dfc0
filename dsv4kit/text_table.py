"""Text tables: columns as wide as their widest cell, two spaces between them, nothing at the end of a line."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
