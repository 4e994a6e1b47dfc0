"""Ends a segment at a step boundary: the step is saved, weights are synced, metrics written, and verl's loop returns.

    VERL_USE_EXTERNAL_MODULES=dsv4kit.plugin.segment_stop

verl's one stop is `trainer.total_training_steps`. With this plugin it is the length of the whole run in every segment,
so nothing derived from it (the learning rate's decay first of all) changes at a segment's border. When to stop is read
from files, because verl's trainer may run on any node: the target from `plan.json` in DSV4KIT_ATTEMPT_DIR, a request
from the file `STOP` one level up; and from SLURM_JOB_END_TIME. `stopped.json` tells the agent what was decided. Without
the first variable nothing changes.

Needed until verl stops by itself before a time limit; the V1 trainer of 0.9.1 does not (it never reads its ESI option).
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv4kit.plugin.patching import REGISTRY, Outcome, Patch, PatchError, State, attribute, marked, original_of

SWITCH = "DSV4KIT_SEGMENT_STOP"
_RECENT_STEPS = 3
# What the loop must look like for the stop to save once and end: read in 0.9.1 (trainer/ppo/v1/trainer_base.py `fit`).
_EXPECTED_IN_FIT = ("self.global_steps <= self.total_training_steps", "self.config.trainer.save_freq")


class Watch:
    """Decides after each step whether it is the segment's last. Times in seconds."""

    def __init__(self, target: int | None, stop_file: Path | None, deadline: float | None) -> None:
        self._target, self._stop_file, self._deadline = target, stop_file, deadline
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._save_s = 0.0
        self._last_step_at: float | None = None

    @classmethod
    def of_attempt(cls, attempt_dir: Path, end_time: str | None) -> Watch:
        """What the agent planned; `end_time` is SLURM_JOB_END_TIME, in seconds since the epoch."""
        target = json.loads((attempt_dir / "plan.json").read_text(encoding="utf-8"))["target"]
        return cls(target, attempt_dir.parent / "STOP", float(end_time) if end_time else None)

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


def install(module: ModuleType) -> Outcome:
    """Wraps the trainer's `step` and `_save_checkpoint`."""
    trainer = attribute(module, "PPOTrainer")
    fit = inspect.getsource(attribute(trainer, "fit"))
    missing = [text for text in _EXPECTED_IN_FIT if text not in fit]
    if missing:
        raise PatchError(f"PPOTrainer.fit has no {missing[0]!r}: the loop works differently")
    step, save = attribute(trainer, "step"), attribute(trainer, "_save_checkpoint")
    if original_of(step):
        return Outcome(State.APPLIED, "already")
    attempt_dir = os.environ.get("DSV4KIT_ATTEMPT_DIR")
    if not attempt_dir:
        return Outcome(State.NOT_NEEDED, "no segment to stop: DSV4KIT_ATTEMPT_DIR is not set")
    watch = Watch.of_attempt(Path(attempt_dir), os.environ.get("SLURM_JOB_END_TIME"))

    def stopping_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = step(self, *args, **kwargs)
        if reason := watch.reason_to_stop(self.global_steps, time.time()):
            # The loop looks at both right after this: it saves this step, once, and does not begin another.
            self.config.trainer.save_freq = 1
            self.total_training_steps = self.global_steps
            print(f"dsv4kit: step {self.global_steps} is the last of this segment ({reason})", flush=True)
            report = json.dumps({"step": self.global_steps, "reason": reason})
            Path(attempt_dir, "stopped.json").write_text(report, encoding="utf-8")
        return batch

    def timed_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        result = save(self, *args, **kwargs)
        watch.saved(time.time() - began)
        return result

    trainer.step = marked(stopping_step, step)
    trainer._save_checkpoint = marked(timed_save, save)
    return Outcome(State.APPLIED)


REGISTRY.add(
    Patch(
        name="segment stop",
        target="verl.trainer.ppo.v1.trainer_base",
        function="dsv4kit.plugin.segment_stop:install",
        required=True,
        switch=SWITCH,
    )
)
