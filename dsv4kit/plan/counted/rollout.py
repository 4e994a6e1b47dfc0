"""Memory of one vLLM worker: weights, what is left for the KV cache, and whether one longest sequence fits.

Sharding as in vLLM 0.29 `models/deepseek_v4/attention.py`: tensor parallelism splits wq_b, wo_a, wo_b, embedding and
head; everything else of the dense part is on every GPU; experts are split over TP x DP. The KV cache is per data
parallel rank and tensor parallelism does not split it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.gpu_memory import REFERENCE_HIDDEN
from dsv4kit.plan.counted.inputs import NodeKind, RolloutSplit, Work
from dsv4kit.plan.counted.units import GB, GIB

# Bytes of one KV entry: fp8 is 448 + 128 + 8 for the latent and 128 + 4 for the indexer, bf16 two per value.
_MAIN_ENTRY = {1: 584, 2: 1024}
_INDEX_ENTRY = {1: 132, 2: 256}


class RolloutMemory(NamedTuple):
    """One GPU of a replica, GB; `spread_gb`: how far what is taken beside the cache may be below and above."""

    replicas: int
    experts_gb: float
    dense_gb: float
    head_gb: float
    budget_gb: float
    activations_gb: float
    overhead_gb: float
    kv_bytes_per_token: float
    kv_tokens: int
    sequence_gb: float
    fits: bool
    spread_gb: tuple[float, float] = (0.0, 0.0)

    @property
    def word(self) -> Literal["fit", "tight", "no"]:
        """Whether a longest sequence fits: `tight` where it depends on what is only estimated."""
        if self.kv_gb + self.spread_gb[0] < self.sequence_gb:
            return "no"
        return "fit" if self.kv_gb - self.spread_gb[1] >= self.sequence_gb else "tight"

    @property
    def weights_gb(self) -> float:
        """Weights on one GPU."""
        return self.experts_gb + self.dense_gb + self.head_gb

    @property
    def kv_gb(self) -> float:
        """Room for the KV cache; negative where there is none."""
        return self.budget_gb - self.weights_gb - self.activations_gb - self.overhead_gb


@lru_cache(maxsize=64)
def kv_bytes_per_token(g: geo.ModelShape, kv_bytes: int) -> float:
    """All layers together; sliding-window layers keep none beyond their window."""
    per_ratio = {
        geo.SWA: 0.0,
        geo.CSA: (_MAIN_ENTRY[kv_bytes] + _INDEX_ENTRY[kv_bytes]) / geo.CSA,
        geo.HCA: _MAIN_ENTRY[kv_bytes] / geo.HCA,
    }
    return sum(per_ratio[ratio] for ratio in g.layer_ratios)


@lru_cache(maxsize=64)
def sequence_constant_bytes(g: geo.ModelShape) -> float:
    """Per sequence and independent of its length: sliding window (bf16) and the compressors' open windows (fp32)."""
    window = g.sliding_window * g.head_dim * 2 * g.num_layers
    states = sum(
        2 * ratio * (2 if ratio == geo.CSA else 1) * g.head_dim * 4 for ratio in g.layer_ratios if ratio != geo.SWA
    )
    return window + states


@lru_cache(maxsize=512)
def weights_gb(g: geo.ModelShape, rollout: RolloutSplit) -> tuple[float, float, float]:
    """Experts, dense part, and embedding with head on one GPU, in GB."""
    experts = g.num_layers * g.num_experts / rollout.expert * geo.expert_params(g) * geo.MXFP4_BYTES
    heads = g.num_attention_heads * g.head_dim
    split = (g.q_lora_rank + g.o_lora_rank) * heads + g.o_groups * g.o_lora_rank * g.hidden_size
    saved = split * (1 - 1 / rollout.tensor) * geo.FP8_BYTES
    dense = sum(geo.layer_released_bytes(g, ratio) - saved for ratio in g.layer_ratios)
    head = (geo.embedding_params(g) + geo.head_params(g)) * geo.BF16_BYTES / rollout.tensor
    return experts / GB, dense / GB, head / GB


def _spread_gb(g: geo.ModelShape, rollout: RolloutSplit, c: Coefficients) -> tuple[float, float]:
    tokens = g.hidden_size / REFERENCE_HIDDEN * rollout.max_batched_tokens / GB
    per_token, overhead = c.spread("rollout_activation_bytes_per_token"), c.spread("rollout_overhead_gb")
    return math.hypot(per_token[0] * tokens, overhead[0]), math.hypot(per_token[1] * tokens, overhead[1])


def rollout_memory(
    g: geo.ModelShape, hardware: NodeKind, rollout: RolloutSplit, work: Work, world: int, c: Coefficients
) -> RolloutMemory:
    """Memory of one worker of a replica."""
    experts, dense, head = weights_gb(g, rollout)
    activations = (
        c.of("rollout_activation_bytes_per_token") * g.hidden_size / REFERENCE_HIDDEN * rollout.max_batched_tokens / GB
    )
    overhead = c.of("rollout_overhead_gb")
    budget = rollout.utilization * hardware.hbm_gib * GIB / GB
    per_token = kv_bytes_per_token(g, rollout.kv_bytes)
    sequence = (per_token * work.sequence_tokens + sequence_constant_bytes(g)) / GB
    left = budget - experts - dense - head - activations - overhead
    return RolloutMemory(
        replicas=world // rollout.gpus,
        experts_gb=experts,
        dense_gb=dense,
        head_gb=head,
        budget_gb=budget,
        activations_gb=activations,
        overhead_gb=overhead,
        kv_bytes_per_token=per_token,
        kv_tokens=max(0, int(left * GB / per_token)),
        sequence_gb=sequence,
        fits=left >= sequence,
        spread_gb=_spread_gb(g, rollout, c),
    )
