"""Rules a question must hold to before it means anything; the first broken one is a `UserError` with its source."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dsv4kit.errors import UserError
from dsv4kit.plan.counted.checkpoint_size import check_contents
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.counted.layout import max_pipeline

_PARALLEL = "Megatron-LM parallel_state.py"
_CONFIG = "Megatron-LM transformer_config.py"
_VERL_WORKERS = "verl engine_workers.py"
_VERL_ROLLOUT = "verl workers/config/rollout.py"
_VERL_SERVER = "verl vllm_async_server.py"


def check(q: Question) -> None:
    """Raises for the first rule the question breaks."""
    for name, value in _whole_numbers(q):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name}={value}: must be a whole number above 0 (dsv4kit)")
    for name, amount in _amounts(q):
        if not math.isfinite(amount) or amount <= 0:
            raise UserError(f"{name}={amount}: must be a number above 0 (dsv4kit)")
    _check_geometry(q)
    _check_actor(q)
    _check_levers(q)
    _check_rollout(q)
    check_contents(q.contents)


def _whole_numbers(q: Question) -> Iterable[tuple[str, int]]:
    p, w, s = q.parallel, q.work, q.schedule
    yield from (("nodes", p.nodes), ("gpus_per_node", p.gpus_per_node))
    yield from (("TP", p.tensor), ("PP", p.pipeline), ("EP", p.expert), ("CP", p.context))
    yield from (("sequences", w.sequences), ("prompt_tokens", w.prompt_tokens))
    yield from (("response_tokens", w.response_tokens), ("micro_batch_tokens", w.micro_batch_tokens))
    yield from (("steps", s.steps), ("segment_steps", s.segment_steps), ("save_freq", s.save_freq))
    if q.rollout:
        r = q.rollout
        yield from (("rollout TP", r.tensor), ("rollout DP", r.data), ("rollout EP", r.expert))
        yield "max_num_batched_tokens", r.max_batched_tokens


def _amounts(q: Question) -> Iterable[tuple[str, float]]:
    yield from (("hbm_usable_gib", q.hardware.hbm_gib), ("host memory", q.hardware.host_gb))
    yield from (("time limit", q.schedule.time_limit_s), ("object_store_gib", q.levers.object_store_gib))


def _check_geometry(q: Question) -> None:
    g = q.geometry
    wanted = g.num_layers + q.mtp_layers
    if len(g.compress_ratios) < wanted:
        raise UserError(
            f"compress_ratios: {len(g.compress_ratios)} entries for {wanted} layers with MTP; one each ({_CONFIG})"
        )


def _check_actor(q: Question) -> None:
    p, g = q.parallel, q.geometry
    if p.tensor != 1:
        raise UserError(f"TP={p.tensor}: DeepSeek-V4 trains with TP=1 only ({_CONFIG})")
    if p.pipeline > max_pipeline(g.num_layers, g.hash_layers):
        most = max_pipeline(g.num_layers, g.hash_layers)
        raise UserError(
            f"PP={p.pipeline}: {g.num_layers} layers with {g.hash_layers} hash layers in stage 0 allow at most"
            f" {most} ({_CONFIG})"
        )
    if p.world % (p.pipeline * p.context):
        raise UserError(
            f"{p.nodes} nodes x {p.gpus_per_node} GPUs = {p.world}: not a multiple of PP x CP ="
            f" {p.pipeline} x {p.context} ({_PARALLEL})"
        )
    if g.num_experts % p.expert:
        raise UserError(f"EP={p.expert}: does not divide the {g.num_experts} experts of a layer ({_CONFIG})")
    if p.ranks_per_stage % p.expert:
        multiple = math.lcm(p.pipeline * p.expert, p.gpus_per_node) // p.gpus_per_node
        raise UserError(
            f"EP={p.expert}: does not divide the {p.ranks_per_stage} GPUs of a pipeline stage; PP={p.pipeline} x"
            f" EP={p.expert} takes a multiple of {multiple} nodes ({_PARALLEL})"
        )
    if q.hardware.nvlink_domain_gpus > p.gpus_per_node and p.expert > q.hardware.nvlink_domain_gpus:
        raise UserError(
            f"EP={p.expert}: above the NVLink domain of {q.hardware.nvlink_domain_gpus} GPUs (Megatron-Bridge HybridEP)"
        )


def _check_levers(q: Question) -> None:
    levers = q.levers
    if not 0 <= levers.offload_fraction <= 1:
        raise UserError(
            f"offload_fraction={levers.offload_fraction}: between 0 and 1 (Megatron-LM optimizer_config.py)"
        )
    if levers.gpu_state_bytes not in (2, 4, 8):
        raise UserError(f"gpu_state_bytes={levers.gpu_state_bytes}: 8 (fp32), 4 (bf16) or 2 (fp8)")
    if levers.gpu_state_bytes != 8 and not levers.precision_aware:
        raise UserError(
            f"gpu_state_bytes={levers.gpu_state_bytes}: only fp32 (8) without precision_aware"
            " (Megatron-LM optimizer_config.py)"
        )
    if levers.pinned_round_threshold_mb is not None and levers.pinned_round_threshold_mb < 1:
        raise UserError(f"pinned_max_round_threshold_mb={levers.pinned_round_threshold_mb}: above 0 (torch)")


def _check_rollout(q: Question) -> None:
    r, p = q.rollout, q.parallel
    if r is None:
        return
    if not 0 < r.utilization <= 1:
        raise UserError(f"gpu_memory_utilization={r.utilization}: above 0, at most 1 (vLLM)")
    if r.expert not in (1, r.gpus):
        raise UserError(f"rollout EP={r.expert}: 1 or TP x DP = {r.tensor} x {r.data} = {r.gpus} ({_VERL_ROLLOUT})")
    if q.geometry.num_experts % r.expert:
        raise UserError(
            f"rollout EP={r.expert}: does not divide the {q.geometry.num_experts} experts of a layer (vLLM)"
        )
    if p.gpus_per_node % r.tensor:
        raise UserError(f"rollout TP={r.tensor}: does not divide the {p.gpus_per_node} GPUs of a node ({_VERL_SERVER})")
    if q.geometry.num_attention_heads % r.tensor:
        raise UserError(f"rollout TP={r.tensor}: does not divide {q.geometry.num_attention_heads} heads (vLLM)")
    if r.gpus % p.gpus_per_node and p.gpus_per_node % r.gpus:
        raise UserError(
            f"rollout TP x DP = {r.gpus}: neither whole nodes of {p.gpus_per_node} GPUs nor a share of one"
            f" ({_VERL_SERVER})"
        )
    if p.world % r.gpus:
        raise UserError(
            f"{p.nodes} nodes x {p.gpus_per_node} GPUs = {p.world}: not a multiple of the rollout's TP x DP ="
            f" {r.gpus} ({_VERL_WORKERS})"
        )
