"""When which phase of an attempt began: one JSON line each, written by node 0. A phase lasts until the next begins.

Standard library only; frozen into every run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dsv4kit.run.files import append_json

BRING_UP = "bring-up"
# The trainer's start, in this order, as far as its log tells them apart (SFT: IMPORT alone).
IMPORT = "import"
ACTOR = "actor"
ROLLOUT = "rollout"
LOAD = "load"
# Training, with saves in between.
STEPS = "steps"
SAVE = "save"
END = "end"

STARTS = (IMPORT, ACTOR, ROLLOUT, LOAD)

MEANINGS = {
    BRING_UP: "the nodes check themselves and come together",
    IMPORT: "the trainer loads its modules and data",
    ACTOR: "the training engines load the weights",
    ROLLOUT: "the rollout servers start",
    LOAD: "the checkpoint is loaded",
    STEPS: "training",
    SAVE: "a checkpoint is saved",
    END: "the processes are ended",
}
"""What a phase is, for people. Runs of older kits have one `trainer start` in place of the four."""


class Mark(NamedTuple):
    """The begin of a phase; `time` is seconds since the epoch."""

    phase: str
    time: float


class Phases:
    """Writes the marks of one attempt."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.now: str | None = None
        self.marks: list[Mark] = []

    def begin(self, phase: str) -> None:
        """Marks the begin of a phase, and so the end of the one before; nothing where it is going on already."""
        if phase != self.now:
            self.now = phase
            self.marks.append(Mark(phase, round(time.time(), 3)))
            append_json(self._path, self.marks[-1]._asdict())

    def note(self, line: str) -> None:
        """Keeps a line for whoever looks at the attempt while it runs."""
        append_json(self._path, {"note": line})


def parse(lines: Iterable[bytes]) -> tuple[list[Mark], list[str]]:
    """The marks and the notes in whole lines of the file; other lines are passed over."""
    marks, notes = [], []
    for line in lines:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(content, dict):
            continue
        if isinstance(content.get("time"), int | float):
            marks.append(Mark(str(content.get("phase")), float(content["time"])))
        if isinstance(content.get("note"), str):
            notes.append(content["note"])
    return marks, notes


def seconds(marks: Iterable[Mark], ended: float | None) -> dict[str, float]:
    """Seconds per phase, its parts put together; the one still going on is left out where `ended` is None."""
    times = [*marks, *([Mark("", ended)] if ended is not None else [])]
    spent: dict[str, float] = {}
    for (phase, since), (_, until) in pairwise(times):
        spent[phase] = spent.get(phase, 0.0) + until - since
    return {phase: round(value, 1) for phase, value in spent.items()}
