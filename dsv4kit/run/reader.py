"""A run's files, read once each: whoever follows a run looks each second, and most of it does not change any more.

Standard library only; frozen into every run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dsv4kit.run import course, metrics, outcome, phases
from dsv4kit.run.course import Course
from dsv4kit.run.directory import AttemptDir, RunDir
from dsv4kit.run.files import GrowingFile
from dsv4kit.run.metrics import StepMetrics
from dsv4kit.run.outcome import Outcome
from dsv4kit.run.phases import Mark


class AttemptReader:
    """What one attempt's files say; `look` brings it up to date."""

    def __init__(self, attempt: AttemptDir) -> None:
        self.directory = attempt
        self.course: Course | None = None
        self.outcome: Outcome | None = None
        self.marks: list[Mark] = []
        self.notes: list[str] = []
        self.steps: dict[int, StepMetrics] = {}
        """Step -> its metrics, several lines of one step put together, in the order of the file."""
        self._phases, self._metrics = GrowingFile(attempt.phases_file), GrowingFile(attempt.metrics_file)
        self._seen: dict[Path, object] = {}
        self._read_to_the_end = False

    @property
    def last(self) -> StepMetrics | None:
        """The last step with metrics."""
        return self.steps[max(self.steps)] if self.steps else None

    def look(self) -> None:
        """Reads what is new. After an attempt's outcome only a cancellation may come, and its container's removal."""
        if self._changed(self.directory.course_file):
            self.course = course.load(self.directory)
        if self._changed(self.directory.phases_file):
            marks, notes = phases.parse(self._phases.new_lines())
            self.marks += marks
            self.notes += notes
        if not self._read_to_the_end:
            there = self.directory.outcome_file.exists()
            for record in map(metrics.parse_line, self._metrics.new_lines()):
                if record:
                    before = self.steps.get(record.step)
                    data: Mapping[str, float | None] = {**before.data, **record.data} if before else record.data
                    self.steps[record.step] = StepMetrics(record.step, data)
            self._read_to_the_end = there
        ended, cancelled = (
            self._changed(path) for path in (self.directory.outcome_file, self.directory.segment.cancel_file)
        )
        if ended or cancelled:
            self.outcome = outcome.load(self.directory)

    def _changed(self, path: Path) -> bool:
        """Whether the file is another one than at the last look."""
        try:
            status = os.stat(path)
            now: object = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError:
            now = None
        before = self._seen.get(path)
        self._seen[path] = now
        return before != now


class RunReader:
    """All attempts of a run."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._attempts: dict[Path, AttemptReader] = {}

    def look(self) -> dict[int, list[AttemptReader]]:
        """Segment -> its attempts, oldest first, up to date."""
        found: dict[int, list[AttemptReader]] = {}
        for segment in self._run.segments():
            readers = []
            for attempt in segment.attempts():
                reader = self._attempts.setdefault(attempt.path, AttemptReader(attempt))
                reader.look()
                readers.append(reader)
            found[segment.number] = readers
        return found
