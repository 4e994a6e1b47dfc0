"""Whether it fits: `fit`, `tight` (inside the planner's own error) or `no`, with the reasons in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.gpu_memory import StageMemory
from dsv4kit.plan.counted.gpu_phases import ROLLOUT
from dsv4kit.plan.counted.host_memory import NodeMemory
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.counted.rollout import RolloutMemory
from dsv4kit.plan.counted.segments import SegmentPlan
from dsv4kit.plan.counted.topology import slurm_segment
from dsv4kit.plan.counted.units import GB, GIB

Word = Literal["fit", "tight", "no"]
_ORDER: tuple[Word, ...] = ("fit", "tight", "no")
_FULLY_RESHARDABLE_LIMIT = 0.5e12
_CROWDED = 0.9
# verl #8383 on Pro, for responses of 8192 and for loading Megatron shards on 80 GB.
_ADVISED_EP = 16
_SMALL_GPU_GIB = 90
_TRILLION = 1e12


class Verdict(NamedTuple):
    """The verdict; `reasons` say what decided it, `warnings` what else to know."""

    verdict: Word
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether anything speaks against starting."""
        return self.verdict != "no"


def worst(words: Sequence[Word]) -> Word:
    """The worst of them; `fit` for none."""
    return max(words, key=_ORDER.index, default="fit")


def gpu_word(stage: StageMemory) -> Word:
    """Verdict on one stage: `tight` where the interval of a phase crosses what the GPU has."""
    if any(phase.low_gib > stage.limit_gib for phase in stage.phases):
        return "no"
    return "fit" if all(phase.high_gib <= stage.limit_gib for phase in stage.phases) else "tight"


def host_word(node: NodeMemory, c: Coefficients) -> Word:
    """Verdict on one kind of node: `tight` where its interval reaches what the node has.

    What is above it is `no` though the interval may begin below: a node without memory takes the whole run with it.
    """
    if node.used_share > 1:
        return "no"
    crosses = node.physical_gb + node.spread_gb[1] > node.limit_gb
    return "tight" if crosses or node.used_share >= c.of("host_fit_below") else "fit"


def judge(
    q: Question,
    stages: Sequence[StageMemory],
    nodes: Sequence[NodeMemory],
    rollout: RolloutMemory | None,
    segment: SegmentPlan,
    c: Coefficients,
) -> Verdict:
    """The verdict over all of it."""
    found: list[tuple[Word, str]] = []
    stage = max(stages, key=lambda s: (_ORDER.index(gpu_word(s)), s.need_gib, s.training_gib))
    found.append((gpu_word(stage), _gpu_reason(stage)))
    node = max(nodes, key=lambda n: (_ORDER.index(host_word(n, c)), n.physical_gb))
    found.append(
        (
            host_word(node, c),
            f"host: {node.role} holds {node.physical_gb:.0f} of {node.limit_gb:.0f} GB"
            f" ({node.physical_gb - node.spread_gb[0]:.0f} to {node.physical_gb + node.spread_gb[1]:.0f})",
        )
    )
    if q.levers.object_store_gib * GIB / GB > node.limit_gb:
        found.append(("no", f"host: ray.object_store_gib={q.levers.object_store_gib:g} is more than the node has"))
    full = node.physical_gb + node.object_store_gb
    if host_word(node, c) == "fit" and full > node.limit_gb:
        found.append(("tight", f"host: {full:.0f} GB if Ray's object store fills, of {node.limit_gb:.0f} GB"))
    if rollout:
        found.append(_rollout_word(rollout))
    if not segment.steps:
        t = segment.timing
        found.append(
            (
                "no",
                f"time: not one step fits the limit of {q.schedule.time_limit_s:.0f} s: setup {t.setup_s:.0f}, first"
                f" step {t.first_s:.0f}, save {t.save_s:.0f}, tail {t.tail_s:.0f} s",
            )
        )
    if q.fully_reshardable and geo.totals(q.geometry).main > _FULLY_RESHARDABLE_LIMIT:
        found.append(
            ("no", "checkpoint: fully_reshardable gathers 12 B per parameter on rank 0 of each stage at this size")
        )
    word = worst([w for w, _ in found])
    shown = [text for w, text in found if w == word] if word != "fit" else [text for _, text in found]
    return Verdict(word, tuple(shown), _warnings(q, segment, nodes))


def _gpu_reason(stage: StageMemory) -> str:
    phase = max(stage.phases, key=lambda p: (p.low_gib > stage.limit_gib, p.high_gib > stage.limit_gib, p.need_gib))
    text = (
        f"GPU: stage {stage.share.stage} ({stage.share.label}) needs {phase.need_gib:.0f} of {stage.limit_gib:.0f} GiB"
        f" ({phase.low_gib:.0f} to {phase.high_gib:.0f}) in phase {phase.name}"
    )
    if phase.name == ROLLOUT and phase.high_gib > stage.limit_gib:
        text += ": vLLM's share (gpu_memory_utilization) leaves no room for the trainer's context, and vLLM's start-up"
        text += " check fails"
    return text


def _rollout_word(rollout: RolloutMemory) -> tuple[Word, str]:
    taken = rollout.weights_gb + rollout.activations_gb + rollout.overhead_gb
    below, above = rollout.spread_gb
    if rollout.word == "fit":
        return "fit", f"rollout: {rollout.weights_gb:.1f} GB of weights leave room for {rollout.kv_tokens:,} tokens"
    return rollout.word, (
        f"rollout: weights {rollout.weights_gb:.1f} GB with workspace take {taken:.1f} ({taken - below:.1f} to"
        f" {taken + above:.1f}) of the {rollout.budget_gb:.1f} GB that vLLM may take; "
        + ("hardly any" if rollout.fits else "no")
        + " room is left for a full-length sequence"
    )


def _warnings(q: Question, segment: SegmentPlan, nodes: Sequence[NodeMemory]) -> tuple[str, ...]:
    found = []
    fullest = max(nodes, key=lambda node: node.physical_gb)
    if fullest.used_share >= _CROWDED and len(nodes) > 1:
        found.append(
            f"fullest are nodes {fullest.first}-{fullest.first + fullest.nodes - 1}"
            if fullest.nodes > 1
            else f"fullest is node {fullest.first}"
        )
        found[-1] += ", counted in the order of IP addresses as text, in which verl places ranks"
    if 0 < segment.fitting_steps < min(q.schedule.segment_steps, q.schedule.steps):
        found.append(
            f"{segment.fitting_steps} steps fit the time limit of a segment, not the {q.schedule.segment_steps} that"
            " are asked for: segments end early, and there are more of them"
        )
    if q.contents and "optimizer" not in q.contents and q.schedule.steps > segment.steps:
        found.append(
            "checkpoints without the optimizer's state lose precision at every segment boundary; with it"
            " (checkpoint.contents=[model,optimizer,extra]) nothing is lost"
        )
    if q.recipe == "grpo" and q.hardware.hbm_gib < _SMALL_GPU_GIB and q.parallel.expert < _ADVISED_EP:
        why = ["responses of 8192"] * (q.work.response_tokens >= 8192) + ["DIST_CKPT_PATH"] * q.dist_checkpoint
        if why and geo.totals(q.geometry).main > _TRILLION:
            found.append(
                f"upstream advises EP{_ADVISED_EP} for {' and '.join(why)} on GPUs of 80 GB, this has"
                f" EP{q.parallel.expert}; with fewer pipeline stages the GPUs stay the same:"
                f' SET="parallel.actor.expert_parallel_size={_ADVISED_EP} parallel.actor.pipeline_parallel_size=16"'
            )
    env = dict(q.env)
    if q.hardware.nvlink_domain_gpus > q.parallel.gpus_per_node and env.get("NCCL_CUMEM_ENABLE") == "0":
        found.append("NCCL_CUMEM_ENABLE=0 turns NVLink between nodes off, silently (NCCL mnnvl.cc)")
    racks = slurm_segment(q)
    if racks is not None and not (racks and q.placed) and q.parallel.world > q.hardware.nvlink_domain_gpus:
        found.append(
            f"ask Slurm for --segment={racks}: expert groups and replicas then stay within a rack"
            if racks
            else f"no --segment keeps EP={q.parallel.expert} and the rollout's replicas within racks of"
            f" {q.hardware.nvlink_domain_gpus} GPUs: all-to-all leaves NVLink"
        )
    if q.rollout and q.rollout.sleep_level == 1:
        found.append(f"sleep level 1 keeps vLLM's weights on the host: {nodes[0].rollout_gb:.0f} GB per node")
    if q.levers.cpu_offload and q.levers.offload_fraction == 0:
        found.append(
            "Adam is to run on the CPU, but OPTIMIZER_OFFLOAD_FRACTION=0 offloads nothing (Megatron-LM's default)"
        )
    if q.recipe == "grpo":
        found.append("verl's own memory metrics show the last pipeline stage only, not the fullest")
    return tuple(found)
