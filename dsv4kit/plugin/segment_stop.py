"""Ends a segment at a step boundary: the step is saved, weights are synced, metrics written, and verl's loop returns.

    VERL_USE_EXTERNAL_MODULES=dsv4kit.plugin.segment_stop

verl's one stop is `trainer.total_training_steps`. With this plugin it is the length of the whole run in every segment,
so nothing derived from it (the learning rate's decay first of all) changes at a segment's border. When to stop is read
from files, because verl's trainer may run on any node: the target from the course of the attempt that
DSV4KIT_ATTEMPT_DIR names, a request from its segment's stop file; and from SLURM_JOB_END_TIME. A file tells the agent
what was decided. Without the first variable nothing changes.

Needed until verl stops by itself before a time limit; the V1 trainer of 0.9.1 does not (it never reads its ESI option).
"""

from __future__ import annotations

import inspect
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv4kit.plugin.patching import REGISTRY, Patch, PatchError, PatchResult, State, attribute, marked, original_of
from dsv4kit.plugin.stop_watch import Watch
from dsv4kit.run.directory import AttemptDir
from dsv4kit.run.files import write_json

SWITCH = "DSV4KIT_SEGMENT_STOP"
# What the loop must look like for the stop to save once and end: read in 0.9.1 (trainer/ppo/v1/trainer_base.py `fit`).
_EXPECTED_IN_FIT = ("self.global_steps <= self.total_training_steps", "self.config.trainer.save_freq")


def install(module: ModuleType) -> PatchResult:
    """Wraps the trainer's `step` and `_save_checkpoint`."""
    trainer = attribute(module, "PPOTrainer")
    fit = inspect.getsource(attribute(trainer, "fit"))
    missing = [text for text in _EXPECTED_IN_FIT if text not in fit]
    if missing:
        raise PatchError(f"PPOTrainer.fit has no {missing[0]!r}: the loop works differently")
    step, save = attribute(trainer, "step"), attribute(trainer, "_save_checkpoint")
    if original_of(step):
        return PatchResult(State.APPLIED, "already")
    attempt_dir = os.environ.get("DSV4KIT_ATTEMPT_DIR")
    if not attempt_dir:
        return PatchResult(State.NOT_NEEDED, "no segment to stop: DSV4KIT_ATTEMPT_DIR is not set")
    attempt = AttemptDir(Path(attempt_dir))
    watch = Watch.of_attempt(attempt, os.environ.get("SLURM_JOB_END_TIME"))

    def stopping_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = step(self, *args, **kwargs)
        if reason := watch.reason_to_stop(self.global_steps, time.time()):
            # The loop looks at both right after this: it saves this step, once, and does not begin another.
            self.config.trainer.save_freq = 1
            self.total_training_steps = self.global_steps
            print(f"dsv4kit: step {self.global_steps} is the last of this segment ({reason})", flush=True)
            write_json(attempt.stopped_file, {"step": self.global_steps, "reason": reason})
        return batch

    def timed_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        result = save(self, *args, **kwargs)
        watch.saved(time.time() - began)
        return result

    trainer.step = marked(stopping_step, step)
    trainer._save_checkpoint = marked(timed_save, save)
    return PatchResult(State.APPLIED)


REGISTRY.add(
    Patch(
        name="segment stop",
        target="verl.trainer.ppo.v1.trainer_base",
        function="dsv4kit.plugin.segment_stop:install",
        required=True,
        switch=SWITCH,
    )
)
