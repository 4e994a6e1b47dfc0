"""Segments of verl's SFT trainer: they end at a step boundary, and a resume at an epoch's end loses no epoch.

    VERL_USE_EXTERNAL_MODULES=dsv4kit.plugin.sft_segments

**The end.** As `segment_stop` does for the PPO trainer: `trainer.total_training_steps` is the length of the whole run
in every segment, and rank 0 decides after each step whether it is the segment's last; all ranks hear of it and save.

**The resume** (verl #7401). A checkpoint at the last step of an epoch holds a data loader that has given everything.
verl then counts itself into the next epoch and asks that loader for it, which gives nothing: a whole epoch is passed
over without a word. At such a step the loader's state says nothing that the step's number does not, so it is left out.

The trainer's module is verl's `__main__` under torchrun, so no import hook can wait for it: both hang on the checkpoint
handler, which the trainer makes before it trains. Read in 0.9.1: trainer/sft_trainer.py, utils/checkpoint.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv4kit.plugin.patching import REGISTRY, Patch, PatchError, PatchResult, State, attribute, marked, original_of
from dsv4kit.plugin.stop_watch import Watch
from dsv4kit.run.directory import AttemptDir
from dsv4kit.run.files import write_json

SWITCH = "DSV4KIT_SFT_SEGMENTS"
# What the loop must look like for a step to be made the last one.
_EXPECTED_IN_FIT = (
    "self.training_client.step_profile()",
    "is_last_step = global_step >= self.total_training_steps",
    "global_step = self.resume_global_step",
)


def at_epoch_end(step: int, steps_per_epoch: int) -> bool:
    """Whether a checkpoint of this step was the last of an epoch."""
    return step > 0 and step % steps_per_epoch == 0


def install(module: ModuleType) -> PatchResult:
    """Wraps the handler's `load_checkpoint` and `_load_dataloader_state`."""
    handler = attribute(module, "CheckpointHandler")
    load, load_data = attribute(handler, "load_checkpoint"), attribute(handler, "_load_dataloader_state")
    if original_of(load):
        return PatchResult(State.APPLIED, "already")

    def loading(self: Any) -> Any:
        _let_it_stop(_trainer_class())
        return load(self)

    def load_data_within_an_epoch(self: Any, path: str) -> None:
        if not at_epoch_end(self.resume_global_step, len(self.train_dataloader)):
            load_data(self, path)
        elif self.rank == 0:
            print(
                f"dsv4kit: step {self.resume_global_step} ended an epoch; the next begins with a new order", flush=True
            )

    handler.load_checkpoint = marked(loading, load)
    handler._load_dataloader_state = marked(load_data_within_an_epoch, load_data)
    return PatchResult(State.APPLIED)


def _trainer_class() -> Any:
    for name in ("__main__", "verl.trainer.sft_trainer"):
        if found := vars(sys.modules.get(name, ModuleType(name))).get("SFTTrainer"):
            return found
    raise PatchError("no SFTTrainer in this process")


def _let_it_stop(trainer: Any) -> None:
    """Wraps the trainer's `fit`; outside of a segment nothing changes."""
    fit = attribute(trainer, "fit")
    attempt_dir = os.environ.get("DSV4KIT_ATTEMPT_DIR")
    if original_of(fit) or not attempt_dir:
        return
    source = inspect.getsource(fit)
    if missing := [text for text in _EXPECTED_IN_FIT if text not in source]:
        raise PatchError(f"SFTTrainer.fit has no {missing[0]!r}: the loop works differently")

    def stopping_fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        _watch_steps(self, AttemptDir(Path(attempt_dir)))
        return fit(self, *args, **kwargs)

    trainer.fit = marked(stopping_fit, fit)


def _watch_steps(trainer: Any, attempt: AttemptDir) -> None:
    """After every step all ranks agree on whether it is the last, before verl's loop asks."""
    watch = Watch.of_attempt(attempt, os.environ.get("SLURM_JOB_END_TIME"))
    client, handler = trainer.training_client, trainer.ckpt_handler
    after_step, save = client.step_profile, handler.save_checkpoint
    step = trainer.resume_global_step

    def then_decide(*args: Any, **kwargs: Any) -> Any:
        nonlocal step
        step += 1
        result = after_step(*args, **kwargs)
        reason = _agreed(watch.reason_to_stop(step, time.time()) if trainer.rank == 0 else None)
        if reason is not None:
            trainer.total_training_steps = step
            if trainer.rank == 0:
                print(f"dsv4kit: step {step} is the last of this segment ({reason})", flush=True)
                write_json(attempt.stopped_file, {"step": step, "reason": reason})
        return result

    def timed_save(*args: Any, **kwargs: Any) -> Any:
        began = time.time()
        result = save(*args, **kwargs)
        watch.saved(time.time() - began)
        return result

    client.step_profile, handler.save_checkpoint = then_decide, timed_save


def _agreed(reason: str | None) -> str | None:
    """Rank 0's reason, on every rank: each by itself might look at file and clock a moment too late."""
    import torch
    import torch.distributed

    box = [reason]
    torch.distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


REGISTRY.add(
    Patch(
        name="sft segments",
        target="verl.utils.checkpoint.checkpoint_handler",
        function="dsv4kit.plugin.sft_segments:install",
        required=True,
        switch=SWITCH,
    )
)
