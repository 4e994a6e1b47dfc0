"""The course of a segment: the step it begins with and the one it ends with, as node 0 has fixed them for an attempt.

The file is `plan.json`; what may be asked of a segment beforehand is its `request.json`.

Standard library only; frozen into every run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dsv4kit.run.directory import AttemptDir, SegmentDir
from dsv4kit.run.files import read_object, write_json


@dataclass(frozen=True)
class Course:
    """The step an attempt resumes from (0: from scratch) and its last one.

    `actions`: what was done to the checkpoints before. `refusal`: why the attempt must not run; empty where it may.
    """

    start: int
    target: int
    actions: list[str] = dataclasses.field(default_factory=list)
    refusal: list[str] = dataclasses.field(default_factory=list)

    def save(self, attempt: AttemptDir) -> None:
        """Writes it for one attempt."""
        write_json(attempt.course_file, dataclasses.asdict(self))


def load(attempt: AttemptDir) -> Course | None:
    """The course of an attempt; None while there is none."""
    content = read_object(attempt.course_file)
    start, target = content.get("start"), content.get("target")
    if not isinstance(start, int) or not isinstance(target, int):
        return None
    return Course(start, target, list(content.get("actions") or []), list(content.get("refusal") or []))


@dataclass(frozen=True)
class SegmentRequest:
    """What the user asks of a segment: to go on from the checkpoint of an older step, or (step 0) to start over."""

    from_step: int | None = None
    allow_restart: bool = False

    def save(self, segment: SegmentDir) -> None:
        """Writes it for a segment that has not begun."""
        write_json(segment.request_file, dataclasses.asdict(self))


def request_of(segment: SegmentDir) -> SegmentRequest:
    """What was asked of the segment; nothing where there is no such file."""
    content = read_object(segment.request_file)
    return SegmentRequest(content.get("from_step"), bool(content.get("allow_restart")))
