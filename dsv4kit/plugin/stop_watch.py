"""When a segment's step is its last: at its target, when asked to, or before the time limit."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from dsv4kit.run import course
from dsv4kit.run.directory import AttemptDir

_RECENT_STEPS = 3


class Watch:
    """Decides after each step whether it is the segment's last. Times in seconds."""

    def __init__(self, target: int | None, stop_file: Path | None, deadline: float | None) -> None:
        self._target, self._stop_file, self._deadline = target, stop_file, deadline
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._save_s = 0.0
        self._last_step_at: float | None = None

    @classmethod
    def of_attempt(cls, attempt: AttemptDir, end_time: str | None) -> Watch:
        """What the agent planned; `end_time` is SLURM_JOB_END_TIME, in seconds since the epoch."""
        planned = course.load(attempt)
        if planned is None:
            raise FileNotFoundError(f"{attempt.course_file}: missing or damaged; it holds the segment's last step")
        return cls(planned.target, attempt.segment.stop_file, float(end_time) if end_time else None)

    def saved(self, seconds: float) -> None:
        """A checkpoint took this long."""
        self._save_s = max(self._save_s, seconds)

    def reason_to_stop(self, step: int, now: float) -> str | None:
        """Why this step, just made, has to be the last of the segment; None to go on.

        For the time limit: what is still to come of this step (its save), a whole further step, and that step's save
        must fit. A step's time is the longest of the last three, from one call to the next, so saves are in it.
        """
        if self._last_step_at is not None:
            self._step_times.append(now - self._last_step_at)
        self._last_step_at = now
        if self._target is not None and step >= self._target:
            return "segment done"
        if self._stop_file is not None and self._stop_file.exists():
            return "stop requested"
        if self._deadline is not None and self._step_times:
            needed = max(self._step_times) + 2 * self._save_s
            if now + needed > self._deadline:
                return f"time limit: {self._deadline - now:.0f} s left, {needed:.0f} s needed"
        return None
