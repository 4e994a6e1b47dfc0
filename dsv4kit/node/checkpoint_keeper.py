"""What is done about the checkpoints while the driver trains: each is brought to disk, looked into, its sizes recorded;
then the old ones that the run need not keep are deleted.

All of it waits for a file system, so it has a thread of its own, and the driver's watch never waits for it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Collection
from pathlib import Path

from dsv4kit.checkpoint import inspection, retention, tracker
from dsv4kit.run import course, metrics
from dsv4kit.run.directory import AttemptDir, RunDir
from dsv4kit.run.node_spec import NodeSpec

_POLL_S = 0.25


class CheckpointKeeper:
    """One attempt's; `start` is the step it resumed from.

    Deleted is only what is older than a checkpoint that was seen complete on disk; never the tracker's step, the one
    this attempt began with, one that this or a later segment was asked to go back to, or one with a `keep` file.
    """

    def __init__(self, spec: NodeSpec, attempt: AttemptDir, start: int) -> None:
        self._spec, self._attempt, self._start = spec, attempt, start
        self._directory = Path(spec.checkpoint_dir)
        self._recorded = start
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._told: set[str] = set()
        self._driver_ended, self._settled, self._given_up = threading.Event(), threading.Event(), threading.Event()
        # A daemon: what is still being deleted when the agent ends is deleted at the next start.
        self._thread = threading.Thread(target=self._run, name="checkpoint keeper", daemon=True)

    def begin(self) -> None:
        """Starts; what an earlier attempt did not get to is done first."""
        self._thread.start()

    def new_lines(self) -> list[str]:
        """What was done since the last call, one readable line each."""
        lines = []
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait())
        return lines

    def settle(self, limit_s: float) -> None:
        """The driver has ended: returns once its last checkpoint is recorded, or after `limit_s`."""
        self._driver_ended.set()
        self._settled.wait(limit_s)

    def close(self, limit_s: float, hurry: threading.Event) -> None:
        """Returns once nothing is left to delete, after `limit_s`, or soon after `hurry` is set; deletes no more."""
        left = limit_s
        while self._thread.is_alive() and left > 0 and not hurry.is_set():
            self._thread.join(_POLL_S)
            left -= _POLL_S
        self._given_up.set()

    def _run(self) -> None:
        for line in retention.delete_leftovers(self._directory):
            self._tell(line)
        due = True  # the attempt before may have ended right after its last save
        while not self._driver_ended.is_set():
            due = self._record() or due
            if due and not self._driver_ended.is_set():
                self._prune()
                due = False
            self._driver_ended.wait(_POLL_S)
        due = self._record() or due
        self._settled.set()
        if due:
            self._prune()

    def _record(self) -> bool:
        """Records the sizes of a checkpoint that the tracker names newly; whether it did."""
        step = tracker.read_tracker(self._directory)
        if step is None or step <= self._recorded:
            return False
        try:
            inspection.record_sizes(
                inspection.step_directory(self._directory, step), self._spec.checkpoint_contents, self._spec.data_ranks
            )
        except (inspection.CheckpointError, OSError):  # not whole yet: the next look tries again
            return False
        self._recorded = step
        return True

    def _prune(self) -> None:
        if self._spec.keep_last is None:
            return
        try:
            state = inspection.inspect(self._directory, self._spec.checkpoint_contents, self._spec.data_ranks)
        except OSError as error:
            self._tell(f"could not look for old checkpoints in {self._directory}: {error.strerror or error}")
            return
        best = self._best({step.step for step in state.complete}) if self._spec.keep_best else []
        surplus = retention.retention_plan(state, self._spec.keep_last, self._spec.keep_every, [self._start, *best])
        for line in retention.apply_retention(self._directory, surplus, self._spared):
            self._tell(line)

    def _spared(self) -> Collection[int] | None:
        """Asked before each step is deleted: those somebody wants back; None once this attempt may delete no more."""
        if self._given_up.is_set():
            return None
        own = self._attempt.segment
        segments = RunDir(own.path.parents[1]).segments()
        wanted = (course.request_of(segment).from_step for segment in segments if segment.number >= own.number)
        return [self._start, *(step for step in wanted if step is not None)]

    def _best(self, complete: Collection[int]) -> list[int]:
        """The `keep_best` complete steps with the highest reward; of equal ones the newer."""
        run = RunDir(self._attempt.segment.path.parents[1])
        curve = metrics.merge(metrics.read_metrics(attempt.metrics_file) for attempt in run.attempts())
        return metrics.best(curve, complete, self._spec.keep_best or 0)

    def _tell(self, line: str) -> None:
        """Once: a file that cannot be deleted is tried again at each save."""
        if line not in self._told:
            self._told.add(line)
            self._lines.put(line)
