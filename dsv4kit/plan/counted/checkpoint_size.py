"""What a checkpoint holds and weighs.

Contents are verl's: `model` is a quantised Hugging Face tree (FP8 and MXFP4, as released), or bf16 Megatron shards with
dist checkpointing; `optimizer` is fp32 parameters and Adam moments, a second master on top without the precision-aware
optimizer (Megatron-LM `distrib_optimizer.py`); `extra` is random state, a few MB.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dsv4kit.errors import UserError
from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.inputs import Question, RunLength
from dsv4kit.plan.counted.units import GB

KNOWN = ("model", "optimizer", "extra")
_EXTRA_GB = 0.005


class CheckpointSize(NamedTuple):
    """One checkpoint; `parts_gb` by content."""

    contents: tuple[str, ...]
    parts_gb: tuple[tuple[str, float], ...]
    lossless: bool
    note: str

    @property
    def size_gb(self) -> float:
        """All of it."""
        return sum(size for _, size in self.parts_gb)


def checkpoints_on_disk(length: RunLength) -> int:
    """The most checkpoints there are at one time: those that stay, and the one that is being saved.

    One is saved every `save_freq` steps and at the end of each segment. The one that a segment began with stays until
    the segment ends.
    """
    per_segment = math.ceil(min(length.segment_steps, length.steps) / length.save_freq)
    whole, rest = divmod(length.steps, length.segment_steps)
    saved = whole * per_segment + math.ceil(rest / length.save_freq)
    if length.keep_last is None:
        return saved
    kept = length.keep_last + (length.keep_best or 0) + (length.steps // length.keep_every if length.keep_every else 0)
    begun_with = per_segment > length.keep_last
    return min(saved, kept + begun_with + 1)


def check_contents(contents: tuple[str, ...]) -> None:
    """Unknown contents are a `UserError`."""
    for name in contents:
        if name not in KNOWN:
            raise UserError(f"checkpoint contents {name!r}: not one of {', '.join(KNOWN)} (verl save_contents)")
    if not contents:
        raise UserError("checkpoint contents: empty; a checkpoint holds at least one of " + ", ".join(KNOWN))


def checkpoint_size(q: Question) -> CheckpointSize:
    """Size and worth of a checkpoint with the question's contents."""
    check_contents(q.contents)
    sums = geo.totals(q.geometry)
    parameters = sums.with_mtp if q.mtp else sums.main
    per_state = 16 if q.levers.cpu_offload and not q.levers.precision_aware else 12
    quantised = sums.released_with_mtp_bytes if q.mtp else sums.released_bytes
    sizes = {
        "model": (2 * parameters if q.dist_checkpoint else quantised) / GB,
        "optimizer": per_state * parameters / GB,
        "extra": _EXTRA_GB,
    }
    lossless = "optimizer" in q.contents and "model" in q.contents
    return CheckpointSize(
        contents=q.contents,
        parts_gb=tuple((name, sizes[name]) for name in KNOWN if name in q.contents),
        lossless=lossless,
        note=_note(q, lossless),
    )


def _note(q: Question, lossless: bool) -> str:
    if lossless:
        return "a resume continues with masters and Adam moments as they were"
    if "model" not in q.contents:
        return "holds no weights: a resume starts from the base model's"
    kept = "bf16" if q.dist_checkpoint else "FP8 and MXFP4"
    return (
        f"a resume starts from {kept} weights and empty Adam moments; steps of lr 1e-6 are far below {kept}"
        " resolution, so that much of a segment's progress is lost without any metric showing it (derived, not"
        " measured). Only [model, optimizer, extra] loses nothing"
    )
