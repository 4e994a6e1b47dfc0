"""GPU memory of one rank of each pipeline stage, at its peak during the update.

    W = 2 P                       bf16 weights (Megatron's DDP parameter buffer)
    G = 2 P or 4 P                gradient buffer, bf16 or fp32
    M = 4 S                       fp32 main shards; they stay on the GPU under CPU offload unless precision-aware
      + (1-f) states S            Adam moments of what is not on the CPU
    T = 4 S                       fp32 cast of bf16 gradients in the optimizer step, not precision-aware
    A = a1 tokens + in-flight micro-batches x layers x tokens x 4h x 2
    peak = W + G + M + max(A, T) + a0          need = peak + CUDA context + sleeping vLLM

P parameters held, S parameters whose optimizer state is owned, f the share whose Adam runs on the CPU. Sources:
Megatron-LM `distrib_optimizer.py`, `cpu_offloading/hybrid_optimizer.py`; full recompute, hence one saved input (four
streams wide) per layer and micro-batch in flight.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.inputs import Levers, Question
from dsv4kit.plan.counted.shards import Share
from dsv4kit.plan.counted.units import GIB

REFERENCE_HIDDEN = 7168


class StageMemory(NamedTuple):
    """One GPU of a stage, GiB; `need` adds what torch does not count."""

    share: Share
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    cast_gib: float
    activations_gib: float
    in_flight: int
    peak_gib: float
    need_gib: float
    limit_gib: float

    @property
    def static_gib(self) -> float:
        """What is there the whole update long."""
        return self.weights_gib + self.gradients_gib + self.optimizer_gib

    @property
    def used_share(self) -> float:
        """Need over what the GPU has."""
        return self.need_gib / self.limit_gib


def micro_batches(q: Question) -> int:
    """Micro-batches of one data-parallel rank in a step."""
    tokens = q.work.sequences * q.work.sequence_tokens / q.parallel.context
    return max(1, round(tokens / (q.parallel.data * q.work.micro_batch_tokens)))


def optimizer_bytes_per_state(levers: Levers) -> float:
    """Bytes on the GPU per owned parameter: main shard and Adam moments."""
    left = 1 - levers.on_cpu
    if levers.precision_aware:
        return left * (4 + levers.gpu_state_bytes)
    return 4 + left * 8


def gradient_bytes(levers: Levers) -> int:
    """Bytes per held parameter of the gradient buffer."""
    return 2 if levers.bf16_gradients else 4


def stage_memory(q: Question, share: Share, c: Coefficients) -> StageMemory:
    """Memory of one GPU of the stage."""
    levers, hidden, tokens = q.levers, q.geometry.hidden_size, q.work.micro_batch_tokens
    weights = 2 * share.held
    gradients = gradient_bytes(levers) * share.held
    optimizer = optimizer_bytes_per_state(levers) * share.state
    cast = 4 * share.state if levers.bf16_gradients and not levers.precision_aware else 0
    in_flight = min(micro_batches(q), q.parallel.pipeline - share.stage)
    saved_input = tokens * q.geometry.hyper_connections * hidden * 2
    layers = len(share.layers) + share.mtp
    activations = (
        c.of("activation_bytes_per_token") * hidden / REFERENCE_HIDDEN * tokens + in_flight * layers * saved_input
    )
    peak = (weights + gradients + optimizer + max(activations, cast)) / GIB + c.of("gpu_base_gib")
    resident = c.of("sleeping_rollout_gib") if q.rollout else 0.0
    return StageMemory(
        share=share,
        weights_gib=weights / GIB,
        gradients_gib=gradients / GIB,
        optimizer_gib=optimizer / GIB,
        cast_gib=cast / GIB,
        activations_gib=activations / GIB,
        in_flight=in_flight,
        peak_gib=peak,
        need_gib=peak + c.of("gpu_context_gib", q.hardware.cpu_architecture) + resident,
        limit_gib=q.hardware.hbm_gib,
    )
