"""Keys of verl's PPO trainer (`ppo_trainer`), as GRPO uses it."""

from __future__ import annotations

from dsv4kit.config.schema import Settings
from dsv4kit.verl_keys import chat_template, megatron, rollout
from dsv4kit.verl_keys.features import Features
from dsv4kit.verl_keys.pairs import Pair, Pairs, data_files, micro_batch_tokens

_ROOT = "actor_rollout_ref"
_MODEL, _ACTOR, _ROLLOUT = f"{_ROOT}.model", f"{_ROOT}.actor", f"{_ROOT}.rollout"


def pairs(settings: Settings, features: Features, model_path: str, data_dir: str, layout: str | None) -> Pairs:
    """All but what both trainers share."""
    on_megatron = settings.engine.backend == "megatron"
    if on_megatron:
        yield Pair("model_engine", "megatron", "engine.backend")
    yield from _data(settings, data_dir)
    yield from _model(settings, model_path)
    yield Pair(f"{_ROLLOUT}.n", settings.rollout.n, "rollout.n")
    yield Pair(
        f"{_ROLLOUT}.tensor_model_parallel_size",
        settings.rollout.tensor_model_parallel_size,
        "rollout.tensor_model_parallel_size",
    )
    # What is loaded follows what was saved: verl's load_contents refers to this key.
    yield Pair(f"{_ACTOR}.checkpoint.save_contents", list(settings.checkpoint.contents), "checkpoint.contents")
    if on_megatron:
        yield from megatron.engine(settings, features, f"{_ACTOR}.megatron", layout)
        yield from megatron.optimizer(settings, f"{_ACTOR}.optim")
        tokens = micro_batch_tokens(settings)
        yield Pair(f"{_ACTOR}.ppo_max_token_len_per_gpu", tokens, "parallel.actor.micro_batch_tokens")
        yield Pair(f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", tokens, "parallel.actor.micro_batch_tokens")
        yield from rollout.split(settings, _ROLLOUT)
    yield from rollout.options(settings, _ROLLOUT)
    if settings.rollout.router_replay != "disabled":
        yield Pair(f"{_ACTOR}.megatron.router_replay.mode", settings.rollout.router_replay, "rollout.router_replay")
    yield from _reward(settings)


def _data(settings: Settings, data_dir: str) -> Pairs:
    data = settings.data
    yield Pair("data.train_files", data_files(data.train_files, data_dir, "train.parquet"), "data.train_files")
    # Read at every start, also where nothing is ever validated.
    yield Pair("data.val_files", data_files(data.val_files, data_dir, "test.parquet"), "data.val_files")
    yield Pair("data.train_batch_size", data.train_batch_size, "data.train_batch_size")
    yield Pair("data.max_prompt_length", data.max_prompt_length, "data.max_prompt_length")
    yield Pair("data.max_response_length", data.max_response_length, "data.max_response_length")
    yield Pair("data.seed", data.seed, "data.seed")


def _model(settings: Settings, model_path: str) -> Pairs:
    model = settings.model
    yield Pair(f"{_MODEL}.path", model.path or model_path, "model.path")
    if model.trust_remote_code:
        yield Pair(f"{_MODEL}.trust_remote_code", True, "model.trust_remote_code")
    if (template := chat_template.read(model.chat_template_file)) is not None:
        yield Pair(f"{_MODEL}.custom_chat_template", template, "model.chat_template_file")
    if settings.engine.backend == "megatron":
        yield Pair(f"{_MODEL}.mtp.enable", settings.parallel.actor.mtp, "parallel.actor.mtp")
        yield Pair(f"{_MODEL}.mtp.enable_train", settings.parallel.actor.mtp, "parallel.actor.mtp")
        # Packed samples; on the Megatron side it decides for the engine as well (engine_workers.py:112).
        yield Pair(f"{_MODEL}.use_remove_padding", True, "engine.backend")


def _reward(settings: Settings) -> Pairs:
    reward = settings.reward
    if reward.function_path:
        yield Pair("reward.custom_reward_function.path", reward.function_path, "reward.function_path")
        yield Pair("reward.custom_reward_function.name", reward.function_name, "reward.function_name")
    if reward.manager:
        yield Pair("reward.reward_manager.name", reward.manager, "reward.manager")
    if reward.manager == "dapo":
        longest, tokens = settings.data.max_response_length, reward.overlong_buffer_tokens
        setting, own = "reward.overlong_buffer_tokens", "reward.reward_kwargs.overlong_buffer_cfg"
        yield Pair("reward.reward_kwargs.max_resp_len", longest, "data.max_response_length")
        yield Pair(f"{own}.enable", tokens is not None, setting)
        yield Pair(f"{own}.len", tokens or longest, setting)
        yield Pair(f"{own}.penalty_factor", reward.overlong_penalty_factor, "reward.overlong_penalty_factor")
        yield Pair(f"{own}.log", False, setting)
