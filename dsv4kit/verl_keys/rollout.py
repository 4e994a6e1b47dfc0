"""Keys of the rollout: how vLLM splits a replica, and what it is started with."""

from __future__ import annotations

from dsv4kit.config.schema import Settings
from dsv4kit.errors import UserError
from dsv4kit.verl_keys.pairs import Pair, Pairs, batched_tokens, is_sft, longest_sequence, replica_gpus, world

_SEED = "actor_rollout_ref.rollout.seed"
_VERL_SEED = 42  # its default, verl/workers/config/rollout.py of 0.9.1


def split(settings: Settings, prefix: str) -> Pairs:
    """One replica's shape and limits."""
    parallel = settings.parallel.rollout
    yield Pair(f"{prefix}.data_parallel_size", parallel.data_parallel_size, "parallel.rollout.data_parallel_size")
    yield Pair(f"{prefix}.expert_parallel_size", expert_parallel(settings), "parallel.rollout.expert_parallel_size")
    yield Pair(
        f"{prefix}.gpu_memory_utilization", parallel.gpu_memory_utilization, "parallel.rollout.gpu_memory_utilization"
    )
    yield Pair(f"{prefix}.max_num_batched_tokens", batched_tokens(settings), "parallel.rollout.max_num_batched_tokens")
    yield Pair(
        f"{prefix}.max_model_len", settings.rollout.max_model_len or longest_sequence(settings), "rollout.max_model_len"
    )
    yield Pair(f"{prefix}.max_num_seqs", max_num_seqs(settings), "rollout.max_num_seqs")


def options(settings: Settings, prefix: str) -> Pairs:
    """What is set only where the settings ask for it."""
    if settings.rollout.router_replay == "R3":
        yield Pair(f"{prefix}.enable_rollout_routing_replay", True, "rollout.router_replay")
    own = f"{prefix}.engine_kwargs.vllm"
    if settings.kernels.moe_backend is not None:
        yield Pair(f"{own}.moe_backend", settings.kernels.moe_backend, "kernels.moe_backend")
    if settings.rollout.kv_cache_dtype is not None:
        yield Pair(f"{own}.kv_cache_dtype", settings.rollout.kv_cache_dtype, "rollout.kv_cache_dtype")


def seed(settings: Settings) -> int | None:
    """What each start of a segment makes vLLM's seed from; None where that seed is not used or is the samples' own."""
    if is_sft(settings) or settings.deterministic:
        return None
    own = settings.verl.get(_SEED, _VERL_SEED)
    if not isinstance(own, int) or isinstance(own, bool):
        raise UserError(f"verl.{_SEED}: must be a whole number, not {own!r}")
    return own


def expert_parallel(settings: Settings) -> int:
    """Ranks the experts of one replica are spread over."""
    return settings.parallel.rollout.expert_parallel_size or replica_gpus(settings)


def max_num_seqs(settings: Settings) -> int:
    """Sequences of one DP rank: with an even spread, all of a step at once (one in verl's script for Flash)."""
    if settings.rollout.max_num_seqs is not None:
        return settings.rollout.max_num_seqs
    samples = settings.data.train_batch_size * settings.rollout.n
    ranks = max(1, world(settings) // settings.rollout.tensor_model_parallel_size)
    return max(1, -(-samples // ranks))
