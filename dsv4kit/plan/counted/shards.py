"""Which parameters each GPU holds, and whose optimizer state it owns.

Ranks are ordered tp-cp-ep-dp-pp (Megatron-LM `parallel_state.py`): a pipeline stage is a contiguous block of ranks, so
its nodes are contiguous too.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.inputs import Levers, Question
from dsv4kit.plan.counted.layout import LayoutRules, PipelineStage, check, generate, weights_for


class Share(NamedTuple):
    """One GPU of a pipeline stage: parameters it holds, and those whose optimizer state it owns (`state`)."""

    stage: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool
    mtp: int
    dense: int
    expert: int
    state: float
    active: int

    @property
    def held(self) -> int:
        """All parameters on the GPU."""
        return self.dense + self.expert

    @property
    def label(self) -> str:
        """What the stage holds, in words."""
        parts = [f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"]
        parts += ["embedding"] * self.embedding + ["MTP"] * bool(self.mtp) + ["head"] * self.head
        return " + ".join(parts)


def rules_of(q: Question) -> LayoutRules:
    """What a layout of this question has to hold."""
    return LayoutRules(q.parallel.pipeline, q.geometry.num_layers, q.geometry.hash_layers, q.mtp_layers)


def layout_of(q: Question) -> str:
    """The layout string in use: the user's, or the generated one."""
    if q.layout is not None:
        return q.layout
    p, levers = q.parallel, q.levers
    weights = weights_for(
        q.geometry, p.expert, p.ranks_per_stage, 2 + gradient_bytes(levers), state_bytes(levers) + cast_bytes(levers)
    )
    return generate(rules_of(q), weights)


def gradient_bytes(levers: Levers) -> int:
    """Bytes per held parameter of the gradient buffer."""
    return 2 if levers.bf16_gradients else 4


def state_bytes(levers: Levers) -> float:
    """Bytes on the GPU per owned parameter: main shard and Adam moments."""
    left = 1 - levers.on_cpu
    if levers.precision_aware:
        return left * (4 + levers.gpu_state_bytes)
    return 4 + left * 8


def cast_bytes(levers: Levers) -> int:
    """Bytes per owned parameter of the optimizer step's fp32 gradients."""
    return 4 if levers.bf16_gradients and not levers.precision_aware else 0


def shares(q: Question) -> tuple[Share, ...]:
    """One GPU of every pipeline stage."""
    return tuple(_share(q, rank, stage) for rank, stage in enumerate(check(layout_of(q), rules_of(q))))


def _share(q: Question, rank: int, stage: PipelineStage) -> Share:
    g, p = q.geometry, q.parallel
    before = geo.dense_before(g)
    # The layers of a stage are neighbours.
    dense = before[stage.layers[-1] + 1] - before[stage.layers[0]] if stage.layers else 0
    active = dense + len(stage.layers) * g.experts_per_token * geo.expert_params(g)
    # Megatron builds the embedding on the stage of the MTP layer too (`pre_process or mtp_process`).
    embeddings = stage.embedding or bool(stage.mtp)
    dense += geo.embedding_params(g) * embeddings + geo.head_params(g) * stage.head
    dense += geo.mtp_dense_params(g) * stage.mtp
    active += geo.head_params(g) * (stage.head + stage.mtp)
    active += (geo.mtp_dense_params(g) + g.experts_per_token * geo.expert_params(g)) * stage.mtp
    expert = (len(stage.layers) + stage.mtp) * geo.layer_expert_params(g) // p.expert
    return Share(
        stage=rank,
        layers=stage.layers,
        embedding=stage.embedding,
        head=stage.head,
        mtp=stage.mtp,
        dense=dense,
        expert=expert,
        state=dense / p.ranks_per_stage + expert / p.expert_data,
        active=active,
    )
