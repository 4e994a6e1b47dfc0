"""Which checkpoints stay: what would keep none of those it names, and verl's own way, which forgets at every start."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4kit.feasibility.case import Case, Refusal
from dsv4kit.verl_keys.pairs import is_sft

# verl 0.9.1 (trainer/ppo/v1/trainer_base.py, trainer/sft_trainer.py); null keeps all.
_VERLS_OWN = ("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep", "trainer.max_ckpt_to_keep")


def of_settings(case: Case) -> Iterator[Refusal]:
    """The kit's own three settings."""
    kept, save_freq = case.settings.checkpoint, case.settings.schedule.save_freq
    for key, value in (("keep_every", kept.keep_every), ("keep_best", kept.keep_best)):
        if value is not None and kept.keep_last is None:
            why = "all checkpoints stay as it is; this says what stays besides the newest"
            yield case.refusal(f"checkpoint.{key}", value, why, "also KEEP_LAST=2")
    if kept.keep_every and kept.keep_every % save_freq:
        nearest = -(-kept.keep_every // save_freq) * save_freq
        why = f"no multiple of the {save_freq} steps between checkpoints, so most of these steps are never saved"
        yield case.refusal("checkpoint.keep_every", kept.keep_every, why, f"{nearest} is one")
    if kept.keep_best is not None and is_sft(case.settings):
        yield case.refusal("checkpoint.keep_best", kept.keep_best, "SFT has no reward", "KEEP_EVERY= keeps milestones")


def verls_own(case: Case) -> Iterator[Refusal]:
    """verl deletes only what the same process has saved, and leaves directories with `data.pt` alone."""
    for key in _VERLS_OWN:
        if (value := case.verl(key)) is not None:
            why = (
                "verl forgets at every start what it has saved, and leaves directories with data.pt alone behind,"
                " whether or not the next checkpoint is whole"
            )
            yield case.refusal(f"verl.{key}", value, why, f"KEEP_LAST={value} is what the kit does")


RULES = (of_settings, verls_own)
