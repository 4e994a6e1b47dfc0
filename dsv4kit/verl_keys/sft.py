"""Keys of verl's SFT trainer (`sft_trainer_engine`)."""

from __future__ import annotations

from dsv4kit.config.schema import Settings
from dsv4kit.verl_keys import chat_template, megatron
from dsv4kit.verl_keys.features import Features
from dsv4kit.verl_keys.pairs import Pair, Pairs, data_files, longest_sequence, micro_batch_tokens

_TEST_FREQ = "trainer.test_freq"


def pairs(settings: Settings, features: Features, model_path: str, data_dir: str, layout: str | None) -> Pairs:
    """All but what both trainers share."""
    on_megatron = settings.engine.backend == "megatron"
    if on_megatron:
        # Both groups: the optimizer's keys are those of its engine.
        yield Pair("engine", "megatron", "engine.backend")
        yield Pair("optim", "megatron", "engine.backend")
    yield from _data(settings, data_dir)
    yield from _model(settings, model_path, on_megatron)
    # What is loaded follows what was saved.
    yield Pair("checkpoint.save_contents", list(settings.checkpoint.contents), "checkpoint.contents")
    if on_megatron:
        yield from megatron.engine(settings, features, "engine", layout)
        yield from megatron.optimizer(settings, "optim")
        yield from _schedule(settings)
    yield Pair("trainer.seed", settings.data.seed, "data.seed")
    if _TEST_FREQ not in settings.verl:
        # Without a file there is nothing to validate on, and verl's check at a step would fail.
        yield Pair(_TEST_FREQ, "after_each_epoch" if settings.data.val_files else -1, "data.val_files")


def _schedule(settings: Settings) -> Pairs:
    """A learning rate that falls does so over the whole run: verl's own length is that of a segment."""
    style = settings.verl.get("optim.lr_decay_style")
    if style not in (None, "constant") and "optim.lr_decay_steps" not in settings.verl:
        yield Pair("optim.lr_decay_steps", settings.schedule.steps, "schedule.steps")


def _data(settings: Settings, data_dir: str) -> Pairs:
    data = settings.data
    yield Pair("data.train_files", data_files(data.train_files, data_dir, "sft.parquet"), "data.train_files")
    if data.val_files:
        yield Pair("data.val_files", list(data.val_files), "data.val_files")
    yield Pair("data.train_batch_size", data.train_batch_size, "data.train_batch_size")
    yield Pair("data.max_length", longest_sequence(settings), "data.max_response_length")
    yield Pair("data.max_token_len_per_gpu", micro_batch_tokens(settings), "parallel.actor.micro_batch_tokens")


def _model(settings: Settings, model_path: str, on_megatron: bool) -> Pairs:
    model = settings.model
    yield Pair("model.path", model.path or model_path, "model.path")
    if model.trust_remote_code:
        yield Pair("model.trust_remote_code", True, "model.trust_remote_code")
    if (template := chat_template.read(model.chat_template_file)) is not None:
        yield Pair("model.custom_chat_template", template, "model.chat_template_file")
    if on_megatron:
        yield Pair("model.mtp.enable", settings.parallel.actor.mtp, "parallel.actor.mtp")
        yield Pair("model.mtp.enable_train", settings.parallel.actor.mtp, "parallel.actor.mtp")
        # Packed samples (THD) are the engine's affair; the model's own switch is for FSDP (verl #6603).
        yield Pair("model.use_remove_padding", False, "engine.backend")
        yield Pair("engine.use_remove_padding", True, "engine.backend")
