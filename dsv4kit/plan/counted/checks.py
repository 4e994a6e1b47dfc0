"""Rules a question must hold to before it means anything, each with its source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dsv4kit.errors import UserError
from dsv4kit.plan.counted.checkpoint_size import check_contents
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.counted.layout import max_pipeline

_PARALLEL = "Megatron-LM parallel_state.py"
_CONFIG = "Megatron-LM transformer_config.py"
_VERL_WORKERS = "verl engine_workers.py"
_VERL_ROLLOUT = "verl workers/config/rollout.py"
_VERL_SERVER = "verl vllm_async_server.py"
_OPTIMIZER = "Megatron-LM optimizer_config.py"

_ACTOR = "parallel.actor"
_REPLICA = "parallel.rollout"
_ROLLOUT_TENSOR = "rollout.tensor_model_parallel_size"


class Broken(NamedTuple):
    """One rule that is broken: the settings key it is about and its name here, the value, why, and what would do."""

    key: str
    name: str
    value: object
    reason: str
    instead: str = ""

    @property
    def line(self) -> str:
        """The rule in the planner's own words."""
        text = f"{self.name}={self.value}: {self.reason}"
        return f"{text}; {self.instead}" if self.instead else text


def check(q: Question) -> None:
    """Raises UserError for the first rule the question breaks."""
    for found in broken(q):
        raise UserError(found.line)


def check_rollout(q: Question) -> None:
    """As `check`, of the rollout alone: a replica's shape, and whether replicas go into the nodes."""
    for found in _rollout(q):
        raise UserError(found.line)
    if q.rollout and q.parallel.world % q.rollout.gpus:
        raise UserError(f"{q.parallel.world} GPUs are no whole number of replicas")


def broken(q: Question) -> Iterator[Broken]:
    """Every rule the question breaks, those it breaks on any number of nodes first."""
    yield from of_model(q)
    yield from of_nodes(q)


def of_model(q: Question) -> Iterator[Broken]:
    """Rules that no number of nodes helps with; where a number is none, only that."""
    numbers = list(_numbers(q))
    yield from numbers
    if numbers:
        return
    yield from _geometry(q)
    yield from _actor(q)
    yield from _levers(q)
    yield from _rollout(q)
    yield from _contents(q)


def of_nodes(q: Question) -> Iterator[Broken]:
    """Whether both splits go into the nodes; nothing where a number is none."""
    if next(_numbers(q), None):
        return
    p, r = q.parallel, q.rollout
    if p.world % (p.pipeline * p.context):
        why = f"{p.world} GPUs, not a multiple of PP x CP = {p.pipeline} x {p.context} ({_PARALLEL})"
        yield Broken("schedule.nodes", "nodes", p.nodes, why)
    elif p.ranks_per_stage % p.expert:
        multiple = math.lcm(p.pipeline * p.expert, p.gpus_per_node) // p.gpus_per_node
        why = f"does not divide the {p.ranks_per_stage} GPUs of a pipeline stage ({_PARALLEL})"
        takes = f"PP={p.pipeline} x EP={p.expert} takes a multiple of {multiple} nodes"
        yield Broken(f"{_ACTOR}.expert_parallel_size", "EP", p.expert, why, takes)
    if r and p.world % r.gpus:
        why = f"{p.world} GPUs, not a multiple of the rollout's TP x DP = {r.gpus} ({_VERL_WORKERS})"
        yield Broken("schedule.nodes", "nodes", p.nodes, why)


def fits_rollout_tensor(tensor: int, data: int, gpus_per_node: int) -> bool:
    """Whether vLLM can split a replica so: within a node, or over whole nodes where there is no data parallelism.

    verl asserts the former for data parallelism only (`vllm_async_server.py:384`).
    """
    return gpus_per_node % tensor == 0 or (data == 1 and tensor % gpus_per_node == 0)


def _numbers(q: Question) -> Iterator[Broken]:
    for key, name, value in _whole_numbers(q):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield Broken(key, name, value, "must be a whole number above 0 (dsv4kit)")
    for key, name, amount in _amounts(q):
        if not math.isfinite(amount) or amount <= 0:
            yield Broken(key, name, amount, "must be a number above 0 (dsv4kit)")


def _whole_numbers(q: Question) -> Iterable[tuple[str, str, int]]:
    p, w, s = q.parallel, q.work, q.schedule
    yield from (("schedule.nodes", "nodes", p.nodes), ("hardware.gpus_per_node", "gpus_per_node", p.gpus_per_node))
    yield f"{_ACTOR}.tensor_parallel_size", "TP", p.tensor
    yield f"{_ACTOR}.pipeline_parallel_size", "PP", p.pipeline
    yield f"{_ACTOR}.expert_parallel_size", "EP", p.expert
    yield f"{_ACTOR}.context_parallel_size", "CP", p.context
    yield "data.train_batch_size", "sequences", w.sequences
    yield "data.max_prompt_length", "prompt_tokens", w.prompt_tokens
    yield "data.max_response_length", "response_tokens", w.response_tokens
    yield f"{_ACTOR}.micro_batch_tokens", "micro_batch_tokens", w.micro_batch_tokens
    yield "schedule.steps", "steps", s.steps
    yield "schedule.segment_steps", "segment_steps", s.segment_steps
    yield "schedule.save_freq", "save_freq", s.save_freq
    if q.rollout:
        r = q.rollout
        yield _ROLLOUT_TENSOR, "rollout TP", r.tensor
        yield f"{_REPLICA}.data_parallel_size", "rollout DP", r.data
        yield f"{_REPLICA}.expert_parallel_size", "rollout EP", r.expert
        yield f"{_REPLICA}.max_num_batched_tokens", "max_num_batched_tokens", r.max_batched_tokens


def _amounts(q: Question) -> Iterable[tuple[str, str, float]]:
    yield "hardware.hbm_usable_gib", "hbm_usable_gib", q.hardware.hbm_gib
    yield "hardware.memory_per_numa_node_gb", "host memory", q.hardware.host_gb
    yield "schedule.time", "time limit", q.schedule.time_limit_s
    yield "ray.object_store_gib", "object_store_gib", q.levers.object_store_gib


def _geometry(q: Question) -> Iterator[Broken]:
    ratios, wanted = len(q.geometry.compress_ratios), q.geometry.num_layers + q.mtp_layers
    if ratios < wanted:
        why = f"{ratios} entries for {wanted} layers with MTP; one each ({_CONFIG})"
        yield Broken("model.geometry.compress_ratios", "compress_ratios", list(q.geometry.compress_ratios), why)


def _actor(q: Question) -> Iterator[Broken]:
    p, g = q.parallel, q.geometry
    if p.tensor != 1:
        yield Broken(f"{_ACTOR}.tensor_parallel_size", "TP", p.tensor, f"DeepSeek-V4 trains with TP=1 only ({_CONFIG})")
        return
    most = max_pipeline(g.num_layers, g.hash_layers)
    if p.pipeline > most:
        why = f"{g.num_layers} layers with {g.hash_layers} hash layers in stage 0 allow at most {most} ({_CONFIG})"
        yield Broken(f"{_ACTOR}.pipeline_parallel_size", "PP", p.pipeline, why)
    key = f"{_ACTOR}.expert_parallel_size"
    if g.num_experts % p.expert:
        why = f"does not divide the {g.num_experts} experts of a layer ({_CONFIG})"
        yield Broken(key, "EP", p.expert, why, f"nearest: {_nearest_divisors(p.expert, g.num_experts)}")
    domain = q.hardware.nvlink_domain_gpus
    if domain > p.gpus_per_node and p.expert > domain:
        yield Broken(key, "EP", p.expert, f"above the NVLink domain of {domain} GPUs (Megatron-Bridge HybridEP)")


def _levers(q: Question) -> Iterator[Broken]:
    levers = q.levers
    if not 0 <= levers.offload_fraction <= 1:
        why = f"between 0 and 1 ({_OPTIMIZER})"
        yield Broken("optimizer.offload_fraction", "offload_fraction", levers.offload_fraction, why)
    key, size = "optimizer.gpu_state_bytes", levers.gpu_state_bytes
    if size not in (2, 4, 8):
        yield Broken(key, "gpu_state_bytes", size, "8 (fp32), 4 (bf16) or 2 (fp8)")
    elif size != 8 and not levers.precision_aware:
        yield Broken(key, "gpu_state_bytes", size, f"only fp32 (8) without precision_aware ({_OPTIMIZER})")
    threshold = levers.pinned_round_threshold_mb
    if threshold is not None and threshold < 1:
        key = "env.PYTORCH_CUDA_ALLOC_CONF"
        yield Broken(key, "pinned_max_round_threshold_mb", threshold, "above 0 (torch)")


def _rollout(q: Question) -> Iterator[Broken]:
    r, p, g = q.rollout, q.parallel, q.geometry
    if r is None:
        return
    if not 0 < r.utilization <= 1:
        key = f"{_REPLICA}.gpu_memory_utilization"
        yield Broken(key, "gpu_memory_utilization", r.utilization, "above 0, at most 1 (vLLM)")
    key = f"{_REPLICA}.expert_parallel_size"
    if r.expert not in (1, r.gpus):
        why = f"1 or TP x DP = {r.tensor} x {r.data} = {r.gpus} ({_VERL_ROLLOUT})"
        yield Broken(key, "rollout EP", r.expert, why)
    elif g.num_experts % r.expert:
        why = f"does not divide the {g.num_experts} experts of a layer (vLLM)"
        yield Broken(key, "rollout EP", r.expert, why, f"nearest: {_nearest_divisors(r.expert, g.num_experts)}")
    if not fits_rollout_tensor(r.tensor, r.data, p.gpus_per_node):
        why = f"does not divide the {p.gpus_per_node} GPUs of a node ({_VERL_SERVER})"
        yield Broken(_ROLLOUT_TENSOR, "rollout TP", r.tensor, why)
    elif g.num_attention_heads % r.tensor:
        yield Broken(
            _ROLLOUT_TENSOR, "rollout TP", r.tensor, f"does not divide {g.num_attention_heads} attention heads (vLLM)"
        )
    key = f"{_REPLICA}.data_parallel_size"
    if r.gpus % p.gpus_per_node and p.gpus_per_node % r.gpus:
        why = (
            f"rollout TP x DP = {r.gpus}: neither whole nodes of {p.gpus_per_node} GPUs nor a share of one"
            f" ({_VERL_SERVER})"
        )
        yield Broken(key, "rollout DP", r.data, why)


def _contents(q: Question) -> Iterator[Broken]:
    try:
        check_contents(q.contents)
    except UserError as error:
        yield Broken("checkpoint.contents", "contents", list(q.contents), str(error))


def _nearest_divisors(wanted: int, number: int) -> str:
    """The divisors of `number` next to `wanted`, below and above."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    near = [max((d for d in divisors if d < wanted), default=0), min((d for d in divisors if d > wanted), default=0)]
    return " or ".join(str(d) for d in near if d)
