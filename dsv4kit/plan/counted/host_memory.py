"""Host memory of every node.

Per owned parameter (S) of the nodes' GPUs, under CPU offload f of the optimizer (Megatron-LM `HybridDeviceOptimizer`):
Adam moments 8 f pageable, fp32 master 4 f (pinned, unless precision-aware), gradient copy 4 f pinned; verl parks on the
host between phases what is on the GPU: main shards or the states left there (pageable), bf16 weights (pinned).
torch rounds every pinned tensor up to a power of two (`ATen/core/CachingHostAllocator.h`), which for Pro's experts is
half as much again. Plans are made on physical bytes; `reported_gb` is what the published runs' tools would have shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.inputs import Levers, Question
from dsv4kit.plan.counted.shards import Share
from dsv4kit.plan.counted.units import GB, GIB, MIB, power_of_two_ceil

# GPUs of the nodes whose host base was fitted, by processor.
REFERENCE_GPUS = {"x86_64": 8, "aarch64": 4}
# Fitted host bases include what Ray's object store touched at this ceiling; what a larger one may take comes on top.
_OBJECT_STORE_IN_BASE_GIB = 32.0


class NodeMemory(NamedTuple):
    """One kind of node, GB each; `nodes` of it are equal in all but rounding.

    `spread_gb`: how far the physical bytes may be below and above.
    """

    role: str
    nodes: int
    first: int
    head: bool
    stages: tuple[int, ...]
    optimizer_gb: float
    parked_gb: float
    pinned_gradients_gb: float
    pinned_master_gb: float
    pinned_weights_gb: float
    rollout_gb: float
    base_gb: float
    head_extra_gb: float
    object_store_gb: float
    limit_gb: float
    reported_gb: float
    spread_gb: tuple[float, float] = (0.0, 0.0)

    @property
    def phases(self) -> tuple[tuple[str, float], ...]:
        """GB of each phase: gradients and moments are there from the first update on, parked states while vLLM runs."""
        fixed = self.base_gb + self.head_extra_gb + self.rollout_gb
        states = self.optimizer_gb + self.pinned_gb
        return (
            ("load", fixed + self.pinned_master_gb + self.pinned_weights_gb),
            ("rollout", fixed + states + self.parked_gb),
            ("update", fixed + states),
        )

    @property
    def pageable_gb(self) -> float:
        """Optimizer state on the CPU and what verl parks, without the processes themselves."""
        return self.optimizer_gb + self.parked_gb

    @property
    def pinned_gb(self) -> float:
        """Page-locked memory as torch allocates it."""
        return self.pinned_gradients_gb + self.pinned_master_gb + self.pinned_weights_gb

    @property
    def physical_gb(self) -> float:
        """All bytes."""
        return self.pageable_gb + self.pinned_gb + self.rollout_gb + self.base_gb + self.head_extra_gb

    @property
    def used_share(self) -> float:
        """Physical bytes over what the node has."""
        return self.physical_gb / self.limit_gb


def pinned_factor(g: geo.ModelShape, levers: Levers, bytes_per_element: int = 4) -> float:
    """How much larger the experts' tensors are pinned than in themselves; dense ones are too few to matter."""
    up_gate = 2 * g.hidden_size * g.moe_intermediate_size * bytes_per_element
    down = up_gate // 2
    return (pinned_bytes(up_gate, levers) + pinned_bytes(down, levers)) / (up_gate + down)


def pinned_bytes(size: int, levers: Levers) -> int:
    """What torch allocates for one pinned tensor."""
    threshold = levers.pinned_round_threshold_mb
    return size if threshold is not None and size > threshold * MIB else power_of_two_ceil(size)


class _PerGpu(NamedTuple):
    """One GPU's bytes on the host."""

    optimizer: float
    parked: float
    gradients: float
    master: float
    weights: float


def _per_gpu(q: Question, share: Share, factor: float, pao_pins_master: bool) -> _PerGpu:
    levers, state = q.levers, share.state
    f = levers.on_cpu
    master_pinned = not levers.precision_aware or pao_pins_master
    parked = 0.0
    if levers.optimizer_offload:
        on_gpu_states = levers.gpu_state_bytes if levers.precision_aware else 8
        main_shards = 4 * (1 - f) if levers.precision_aware else 4
        parked = main_shards + (1 - f) * on_gpu_states
    return _PerGpu(
        optimizer=(8 + (0 if master_pinned else 4)) * f * state,
        parked=parked * state,
        gradients=4 * factor * f * state,
        master=4 * factor * f * state if master_pinned else 0.0,
        weights=(
            (pinned_bytes(2 * share.dense, levers) + pinned_bytes(2 * share.expert, levers))
            * (1 + q.training.reference)
            if levers.param_offload
            else 0.0
        ),
    )


def node_memory(
    q: Question, shares: Sequence[Share], c: Coefficients, rollout_weights_gb: float = 0.0
) -> tuple[NodeMemory, ...]:
    """Every kind of node, in rank order; node 0, which holds stage 0, is taken to be Ray's head."""
    factor = pinned_factor(q.geometry, q.levers)
    pao_pins_master = bool(c.of("precision_aware_pins_master"))
    gpus = q.parallel.gpus_per_node
    per_stage = [_per_gpu(q, share, factor, pao_pins_master) for share in shares]
    kinds: dict[tuple[object, ...], list[int]] = {}
    for first, count in _alike(q):
        key = (first == 0, *(_likeness(shares[stage]) for stage in _stages(q, first)))
        kinds.setdefault(key, []).extend(range(first, first + count))
    arch = q.hardware.cpu_architecture
    base = c.of("host_base_gb", arch) * gpus / REFERENCE_GPUS[arch]
    head_extra = c.of("host_head_extra_gb", arch)
    found = []
    spread = tuple(
        math.hypot(
            c.spread("host_base_gb", arch)[i] * gpus / REFERENCE_GPUS[arch], c.spread("host_head_extra_gb", arch)[i]
        )
        for i in (0, 1)
    )
    for key, members in kinds.items():
        head = bool(key[0])
        fullest = max(_ends(q, members), key=lambda node: sum(_total(per_stage[stage]) for stage in _stages(q, node)))
        held = [per_stage[stage] for stage in _stages(q, fullest)]
        found.append(
            _node(
                q, shares, members, head, held, base, head_extra if head else 0.0, rollout_weights_gb * gpus
            )._replace(spread_gb=(spread[0], spread[1]))
        )
    return _merged(found)


def held_gb(
    q: Question, shares: Sequence[Share], c: Coefficients, rollout_weights_gb: float = 0.0
) -> tuple[float, ...]:
    """Physical GB of each node, in rank order, without its processes (`base_gb`, `head_extra_gb`)."""
    factor, pins = pinned_factor(q.geometry, q.levers), bool(c.of("precision_aware_pins_master"))
    per_stage = [_total(_per_gpu(q, share, factor, pins)) / GB for share in shares]
    asleep = rollout_weights_gb * q.parallel.gpus_per_node if q.rollout and q.rollout.sleep_level == 1 else 0.0
    return tuple(sum(per_stage[stage] for stage in _stages(q, node)) + asleep for node in range(q.parallel.nodes))


def _node(
    q: Question,
    shares: Sequence[Share],
    members: Sequence[int],
    head: bool,
    held: Iterable[_PerGpu],
    base_gb: float,
    head_extra_gb: float,
    rollout_gb: float,
) -> NodeMemory:
    held = tuple(held)
    stages = tuple(sorted({stage for node in _ends(q, members) for stage in _stages(q, node)}))
    optimizer, parked = sum(x.optimizer for x in held) / GB, sum(x.parked for x in held) / GB
    gradients, master = sum(x.gradients for x in held) / GB, sum(x.master for x in held) / GB
    weights = sum(x.weights for x in held) / GB
    sleeping = rollout_gb if q.rollout and q.rollout.sleep_level == 1 else 0.0
    pageable = optimizer + parked + base_gb + head_extra_gb
    pinned = gradients + master + weights + sleeping
    return NodeMemory(
        role=_role(shares, stages, head),
        nodes=len(members),
        first=members[0],
        head=head,
        stages=stages,
        optimizer_gb=optimizer,
        parked_gb=parked,
        pinned_gradients_gb=gradients,
        pinned_master_gb=master,
        pinned_weights_gb=weights,
        rollout_gb=sleeping,
        base_gb=base_gb,
        head_extra_gb=head_extra_gb,
        object_store_gb=max(0.0, q.levers.object_store_gib - _OBJECT_STORE_IN_BASE_GIB) * GIB / GB,
        limit_gb=q.hardware.host_gb,
        reported_gb=pageable + pinned if q.hardware.pinned_counts_as_used else pageable,
    )


def _merged(found: Sequence[NodeMemory]) -> tuple[NodeMemory, ...]:
    """The head node together with its like, where being the head costs nothing."""
    head, *rest = found
    for index, other in enumerate(rest):
        if other.stages == head.stages and abs(other.physical_gb - head.physical_gb) < 0.5:
            merged = head._replace(nodes=head.nodes + other.nodes, role=f"{other.role}, one is head")
            return (merged, *rest[:index], *rest[index + 1 :])
    return tuple(found)


def _alike(q: Question) -> Iterable[tuple[int, int]]:
    """Runs of neighbouring nodes that hold the same stages: first node and count. Node 0 is a run of its own."""
    gpus, block = q.parallel.gpus_per_node, q.parallel.ranks_per_stage
    each = block // gpus if block % gpus == 0 else 1
    yield 0, 1
    if each > 1:
        yield 1, each - 1
    yield from ((first, each) for first in range(each, q.parallel.nodes, each))


def _stages(q: Question, node: int) -> list[int]:
    """The stage of each GPU of the node."""
    gpus, block = q.parallel.gpus_per_node, q.parallel.ranks_per_stage
    return [rank // block for rank in range(node * gpus, (node + 1) * gpus)]


def _ends(q: Question, members: Sequence[int]) -> Sequence[int]:
    """One node of each stage among these, where a stage has several whole nodes; else all."""
    gpus, block = q.parallel.gpus_per_node, q.parallel.ranks_per_stage
    if block % gpus or block == gpus:
        return members
    return list({node * gpus // block: node for node in members}.values())


def _likeness(share: Share) -> tuple[object, ...]:
    return len(share.layers), share.embedding, share.head, share.mtp


def _total(x: _PerGpu) -> float:
    return x.optimizer + x.parked + x.gradients + x.master + x.weights


def _role(shares: Sequence[Share], stages: Sequence[int], head: bool) -> str:
    labels = list(dict.fromkeys(shares[stage].label for stage in stages))
    shown = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"
    return f"{'head, ' if head else ''}{shown}: {' / '.join(labels)}"
