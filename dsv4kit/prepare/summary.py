"""What was read, kept and dropped, and how long the rows are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Count:
    """One of the two files while it is made. `lengths`: of what the trainer tokenizes, in tokens or in characters."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    ignored: set[str] = field(default_factory=set)
    lengths: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "read": self.read,
            "rows": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
            "columns_left_out": sorted(self.ignored),
            "lengths": spread(self.lengths),
        }


def spread(lengths: Sequence[int]) -> dict[str, float]:
    """Least, median, 95th percentile, greatest and mean; empty where there are no rows."""
    if not lengths:
        return {}
    ordered = sorted(lengths)

    def at(share: float) -> int:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    mean = round(sum(ordered) / len(ordered), 1)
    return {"least": ordered[0], "median": at(0.5), "p95": at(0.95), "greatest": ordered[-1], "mean": mean}


def lines(form: str, unit: str, files: dict[str, dict[str, Any]], overlap: int | None) -> Iterable[str]:
    """What is shown at the end."""
    for name, count in files.items():
        yield f"{name}: {count['rows']} rows of {count['read']} read, form {form}"
        for reason, number in count["dropped"].items():
            yield f"{name}: dropped {number}: {reason}"
        if count["columns_left_out"]:
            yield f"{name}: columns not taken over: {', '.join(count['columns_left_out'])}"
        if length := count["lengths"]:
            what = "prompts" if form == "grpo" else "conversations"
            shown = ", ".join(f"{label} {value:g}" for label, value in length.items())
            yield f"{name}: {unit} of the {what}: {shown}"
    if overlap is not None:
        yield f"questions of test that train has too: {overlap}"
