"""When which phase of an attempt began: one JSON line each, written by node 0. A phase lasts until the next begins.

The container's removal comes after all others, when the attempt has ended: the batch script writes it with both its
ends. Standard library only; frozen into every run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dsv4kit.run.files import append_json

# From the batch script's srun to node 0's agent; in a container only, and once in a job.
CONTAINER_START = "container start"
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
CONTAINER_REMOVAL = "container removal"

STARTS = (IMPORT, ACTOR, ROLLOUT, LOAD)
# In the batch script's hands: an attempt that starts again in the same job has neither.
OF_CONTAINER = (CONTAINER_START, CONTAINER_REMOVAL)

MEANINGS = {
    CONTAINER_START: "the nodes make their containers of the image",
    BRING_UP: "the nodes check themselves and come together",
    IMPORT: "the trainer loads its modules and data",
    ACTOR: "the training engines load the weights",
    ROLLOUT: "the rollout servers start",
    LOAD: "the checkpoint is loaded",
    STEPS: "training",
    SAVE: "a checkpoint is saved",
    END: "the processes are ended",
    CONTAINER_REMOVAL: "the nodes remove their containers",
}
"""What a phase is, for people. Runs of older kits have one `trainer start` in place of the four."""


class Mark(NamedTuple):
    """The begin of a phase, in seconds since the epoch; `until`: its end, where it does not last to the next one."""

    phase: str
    time: float
    until: float | None = None


class Phases:
    """Writes the marks of one attempt."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.now: str | None = None
        self.marks: list[Mark] = []

    def begin(self, phase: str, since: float | None = None) -> None:
        """Marks the begin of a phase, and so the end of the one before; nothing where it is going on already.

        `since`: it began before now, in seconds since the epoch.
        """
        if phase != self.now:
            self.now = phase
            self.marks.append(Mark(phase, round(time.time() if since is None else since, 3)))
            append_json(self._path, {"phase": phase, "time": self.marks[-1].time})

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
            until = content.get("until")
            marks.append(
                Mark(
                    str(content.get("phase")),
                    float(content["time"]),
                    float(until) if isinstance(until, int | float) else None,
                )
            )
        if isinstance(content.get("note"), str):
            notes.append(content["note"])
    return marks, notes


def spans(marks: Iterable[Mark], ended: float | None) -> Iterator[tuple[str, float, float]]:
    """(phase, its begin, its end) in order; the one still going on is left out where `ended` is None."""
    listed = list(marks)
    following = [mark for mark in listed if mark.until is None]
    for mark, after in pairwise([*following, *([Mark("", ended)] if ended is not None else [])]):
        yield mark.phase, mark.time, after.time
    for mark in listed:
        if mark.until is not None:
            yield mark.phase, mark.time, mark.until


def seconds(marks: Iterable[Mark], ended: float | None) -> dict[str, float]:
    """Seconds per phase, its parts put together; the one still going on is left out where `ended` is None."""
    spent: dict[str, float] = {}
    for phase, since, until in spans(marks, ended):
        spent[phase] = spent.get(phase, 0.0) + until - since
    return {phase: round(value, 1) for phase, value in spent.items()}
