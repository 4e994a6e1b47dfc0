"""Nodes that a run avoids: `excluded_nodes.jsonl`, a line for each with when, in which segment and why.

Only appended to: by node 0 when an attempt ends, by the batch host where no agent could, by `resume` to forget them. A
node that was bad once is not bad for ever, so each line is good for a day.

Standard library only; frozen into every run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsv4kit.run.directory import RunDir
from dsv4kit.run.files import GrowingFile, append_json

EXPIRES_AFTER_S = 24 * 3600.0


@dataclass(frozen=True)
class Exclusion:
    """A node as Slurm calls it, and why it is avoided; `time` in seconds since the epoch."""

    time: float
    segment: int
    node: str
    reason: str


def add(run: RunDir, found: Iterable[Exclusion]) -> None:
    """Appends them."""
    for one in found:
        append_json(run.exclusions_file, asdict(one))


def forget(run: RunDir, now: float) -> None:
    """All nodes excluded so far may be used again."""
    append_json(run.exclusions_file, {"time": now, "forget": True})


def active(run: RunDir, now: float) -> list[Exclusion]:
    """The nodes that are avoided now, each once, the latest first."""
    found: dict[str, Exclusion] = {}
    for line in GrowingFile(run.exclusions_file).new_lines():
        content = _parsed(line)
        if content.get("forget"):
            found = {}
        elif (one := _exclusion(content)) and now - one.time < EXPIRES_AFTER_S:
            found[one.node] = one
    return sorted(found.values(), key=lambda one: one.time, reverse=True)


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):  # cut short by a crash
        return {}
    return content if isinstance(content, Mapping) else {}


def _exclusion(line: Mapping[str, Any]) -> Exclusion | None:
    try:
        return Exclusion(float(line["time"]), int(line["segment"]), str(line["node"]), str(line["reason"]))
    except (KeyError, TypeError, ValueError):
        return None
