"""GPU memory of one rank of each pipeline stage, over the phases of a step (`gpu_phases`).

During the update, which decides nearly always:

    W = 2 P                       bf16 weights (Megatron's DDP parameter buffer)
    G = 2 P or 4 P                gradient buffer, bf16 or fp32
    M = 4 S                       fp32 main shards; they stay on the GPU under CPU offload unless precision-aware
      + (1-f) states S            Adam moments of what is not on the CPU
    T = 4 S                       fp32 cast of bf16 gradients in the optimizer step, not precision-aware
    A = a1 tokens + in-flight micro-batches x layers x tokens x what a layer keeps
    peak = W + G + M + max(A, T) + a0          need = peak + CUDA context + sleeping vLLM

P parameters held, S parameters whose optimizer state is owned, f the share whose Adam runs on the CPU. A layer keeps
its input, four streams wide, where activations are recomputed, else all of them. Sources: Megatron-LM
`distrib_optimizer.py`, `cpu_offloading/hybrid_optimizer.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dsv4kit.plan.counted import gpu_phases
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.gpu_phases import GpuPhase
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.counted.shards import Share, cast_bytes, gradient_bytes, state_bytes
from dsv4kit.plan.counted.units import GIB

REFERENCE_HIDDEN = 7168


class StageMemory(NamedTuple):
    """One GPU of a stage, GiB. `peak`: what torch counts in the update; `need`: all of the phase that takes most."""

    share: Share
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    cast_gib: float
    activations_gib: float
    in_flight: int
    peak_gib: float
    phases: tuple[GpuPhase, ...]
    limit_gib: float

    @property
    def static_gib(self) -> float:
        """What is there the whole update long."""
        return self.weights_gib + self.gradients_gib + self.optimizer_gib

    @property
    def fullest(self) -> GpuPhase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.need_gib)

    @property
    def need_gib(self) -> float:
        """What the fullest phase takes."""
        return self.fullest.need_gib

    @property
    def training_gib(self) -> float:
        """What the update takes: what the levers of the optimizer and the layout act on."""
        return next(phase.need_gib for phase in self.phases if phase.name == gpu_phases.UPDATE)

    @property
    def used_share(self) -> float:
        """Need over what the GPU has."""
        return self.need_gib / self.limit_gib


def micro_batches(q: Question) -> int:
    """Micro-batches of one data-parallel rank in one update, where every sequence has its full length."""
    tokens = q.work.sequences / q.training.updates * q.work.sequence_tokens / q.parallel.context
    return max(1, round(tokens / (q.parallel.data * q.work.micro_batch_tokens)))


def kept_bytes_per_token(q: Question, c: Coefficients) -> float:
    """What one layer keeps of a token until its backward pass."""
    hidden = q.geometry.hidden_size
    if q.training.recompute:
        return q.geometry.hyper_connections * hidden * 2
    return c.of("stored_activation_bytes_per_token_layer") * hidden / REFERENCE_HIDDEN


def stage_memory(q: Question, share: Share, c: Coefficients, rollout_weights_gb: float = 0.0) -> StageMemory:
    """Memory of one GPU of the stage; `rollout_weights_gb` are vLLM's on it."""
    levers, tokens = q.levers, q.work.micro_batch_tokens
    scale = q.geometry.hidden_size / REFERENCE_HIDDEN
    in_flight = min(micro_batches(q), q.parallel.pipeline - share.stage)
    layers = len(share.layers) + share.mtp
    kept = in_flight * layers * tokens * kept_bytes_per_token(q, c)
    one_layer = c.of("activation_bytes_per_token") * scale * tokens
    below, above = (x * scale * tokens for x in c.spread("activation_bytes_per_token"))
    if not q.training.recompute:
        less, more = c.spread("stored_activation_bytes_per_token_layer")
        below = math.hypot(below, in_flight * layers * tokens * less * scale)
        above = math.hypot(above, in_flight * layers * tokens * more * scale)
    parts = gpu_phases.Parts(
        weights=2 * share.held / GIB,
        gradients=gradient_bytes(levers) * share.held / GIB,
        optimizer=state_bytes(levers) * share.state / GIB,
        cast=cast_bytes(levers) * share.state / GIB,
        forward=one_layer / GIB,
        activations=(one_layer + kept) / GIB,
        activations_spread=(below / GIB, above / GIB),
        rollout_weights=rollout_weights_gb * 1e9 / GIB,
    )
    return StageMemory(
        share=share,
        weights_gib=parts.weights,
        gradients_gib=parts.gradients,
        optimizer_gib=parts.optimizer,
        cast_gib=parts.cast,
        activations_gib=parts.activations,
        in_flight=in_flight,
        peak_gib=parts.weights
        + parts.gradients
        + parts.optimizer
        + max(parts.activations, parts.cast)
        + c.of("gpu_base_gib"),
        phases=gpu_phases.phases(q, parts, c),
        limit_gib=q.hardware.hbm_gib,
    )
