"""The plan for people, in text of a hundred columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.shown.recommended import recommended
from dsv4kit.text_table import aligned

if TYPE_CHECKING:
    from dsv4kit.plan.core import Plan
    from dsv4kit.plan.counted.gpu_memory import StageMemory
    from dsv4kit.plan.counted.host_memory import NodeMemory
    from dsv4kit.plan.levers import Lever

WIDTH = 100
_BAR = 50
_SAYS = {"fit": "FITS", "tight": "TIGHT", "no": "DOES NOT FIT"}
# Letter in the bar, and what it stands for.
_PARTS: tuple[tuple[str, str, Callable[[NodeMemory], float]], ...] = (
    ("a", "Adam moments, masters", lambda n: n.optimizer_gb),
    ("p", "parked by verl", lambda n: n.parked_gb),
    ("g", "pinned gradients", lambda n: n.pinned_gradients_gb),
    ("m", "pinned masters", lambda n: n.pinned_master_gb),
    ("w", "pinned weights", lambda n: n.pinned_weights_gb),
    ("r", "rollout's weights", lambda n: n.rollout_gb),
    ("b", "processes", lambda n: n.base_gb),
    ("h", "head node's own", lambda n: n.head_extra_gb),
)


_TERMS = (
    "Terms: PP pipeline stages, each some of the layers; EP GPUs that share the experts; CP GPUs that share each"
    " sequence; TP GPUs that share each matrix; DP copies that work on different sequences; micro-batch: what a stage"
    " works on at a time; pinned: host memory locked for copies from and to GPUs; Adam: the optimizer, whose moments"
    " and masters (fp32 weights) are its state; segment: one Slurm job of the run."
)


def render(
    plan: Plan,
    levers: Sequence[Lever] = (),
    least_nodes: int | None = None,
    command: Callable[[Mapping[str, object]], str] | None = None,
) -> str:
    """The whole answer; `least_nodes` is said where it does not fit.

    `command` gives what takes a recommendation, from the variables that have to be set.
    """
    blocks = [_verdict(plan, least_nodes), _head(plan), _gpu(plan), _phases(plan), _host(plan)]
    if plan.memory.rollout:
        blocks.append(_rollout(plan))
    blocks += [_checkpoint(plan), _time(plan), _warnings(plan)]
    if levers:
        blocks.append(_levers(levers))
    if command:
        blocks.append(_recommended(plan, levers, command))
    blocks.append(_wrapped(_TERMS))
    return "\n\n".join(block for block in blocks if block)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column left-justified, the others right."""
    return "\n".join(aligned([header, *rows], right=range(1, len(header))))


def _wrapped(text: str, first: str = "", rest: str = "  ") -> str:
    import textwrap

    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=rest)


def _head(plan: Plan) -> str:
    q, p = plan.question, plan.question.parallel
    totals = geo.totals(q.geometry)
    parameters = totals.with_mtp if q.mtp else totals.main
    lengths = f"{q.work.sequences} sequences of up to {q.work.prompt_tokens} + {q.work.response_tokens} tokens"
    context = f" x CP {p.context}" if p.context > 1 else ""
    lines = [
        f"{q.model} {q.recipe}: {p.nodes} nodes x {p.gpus_per_node} {q.hardware.name.upper()} = {p.world} GPUs,"
        f" {parameters / 1e9:.0f} B parameters, a step is {lengths}",
        f"actor: {p.pipeline} pipeline stages (PP) of {p.ranks_per_stage} GPUs; experts over {p.expert} GPUs (EP),"
        f" {p.expert_data} {'copy' if p.expert_data == 1 else 'copies'} of each{context}",
        f"layout: {plan.layout}   (E embedding, t layer, m MTP, L head; | between stages)",
        f"constants: {plan.coefficients.origin}",
    ]
    if plan.memory_extrapolated:
        lines.append("memory is extrapolated: " + ", ".join(plan.memory_extrapolated))
    return "\n".join(_wrapped(line) for line in lines)


def _verdict(plan: Plan, least_nodes: int | None) -> str:
    """What somebody reads who reads five lines: whether it fits, what it costs, what a resume loses; then why."""
    least = f"; {least_nodes} nodes is the least that fits with these levers" if least_nodes else ""
    stage = plan.memory.fullest_stage
    used = f", {stage.need_gib:.0f} of {stage.limit_gib:.0f} GiB ({stage.fullest.low_gib:.0f} to"
    used += f" {stage.fullest.high_gib:.0f})"
    node = plan.memory.fullest_node
    if node.physical_gb + node.spread_gb[1] > node.limit_gb:
        used += f" and a node {node.physical_gb:.0f} of {node.limit_gb:.0f} GB"
    lines = [f"VERDICT: {_SAYS[plan.verdict.verdict]}{used}{least}", cost(plan), _loss(plan)]
    lines += [_wrapped(reason, "  ", "    ") for reason in plan.verdict.reasons]
    if plan.question.not_considered:
        lines.append(_wrapped("not considered: " + ", ".join(plan.question.not_considered), "  ", "    "))
    return "\n".join(lines)


def cost(plan: Plan) -> str:
    """Days, GPU-hours and node-hours of the whole run."""
    q, s = plan.question, plan.segment
    if not s.goodput:
        return "COST: never done, no step survives to the next save" if s.steps else "COST: never done"
    low, high = plan.steady_interval_s
    least, most = plan.days_interval
    days = f"{s.days:.1f} days ({least:.1f} to {_days(most)})" if s.days >= 1 else _hours(s.days, least, most)
    return (
        f"COST: {days}, {s.node_hours * q.parallel.gpus_per_node:,.0f} GPU-hours, {s.node_hours:,.0f}"
        f" node-hours: {q.schedule.steps} steps of {plan.step.steady_s:.0f} s ({low:.0f} to {high:.0f})"
    )


def _days(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "never"


def _hours(*days: float) -> str:
    now, least, most = (f"{24 * value:.1f}" if math.isfinite(value) else "never" for value in days)
    return f"{now} hours ({least} to {most})"


def _loss(plan: Plan) -> str:
    c = plan.checkpoint
    return f"RESUMES: {'lossless' if c.lossless else 'LOSSY'}, from checkpoints [{', '.join(c.contents)}]" + (
        f" of {_size(c.size_gb)}"
    )


def _phases(plan: Plan) -> str:
    """The timeline of one step on the fullest GPU and the fullest node."""
    stage = plan.memory.fullest_stage
    node = plan.memory.fullest_node
    names = [phase.name for phase in stage.phases]
    on_node = dict(node.phases)
    # What the node holds while vLLM sleeps does not change between the phases of training.
    held = [on_node.get(name, on_node["update"]) for name in names]
    rows = [
        (f"GPU of stage {stage.share.stage}, GiB", *(f"{phase.need_gib:.0f}" for phase in stage.phases)),
        ("  at least", *(f"{phase.low_gib:.0f}" for phase in stage.phases)),
        ("  at most", *(f"{phase.high_gib:.0f}" for phase in stage.phases)),
        ("fullest node, GB", *(f"{gb:.0f}" for gb in held)),
    ]
    return "Phases of a run, in order (refit: the trained weights go into vLLM)\n" + table(("", *names), rows)


def _runs(stages: Sequence[StageMemory]) -> list[list[StageMemory]]:
    """Neighbours that differ in nothing a reader would see."""
    runs: list[list[StageMemory]] = []
    for stage in stages:
        last = runs[-1][-1] if runs else None
        alike = last is not None and last.share.label == stage.share.label and abs(last.need_gib - stage.need_gib) < 0.5
        if alike:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return runs


def _gpu(plan: Plan) -> str:
    rows = []
    for run in _runs(plan.memory.stages):
        stage = max(run, key=lambda s: s.need_gib)
        name = f"{run[0].share.stage}" if len(run) == 1 else f"{run[0].share.stage}-{run[-1].share.stage}"
        rows.append(
            (
                f"{name}: {stage.share.label}",
                *(
                    f"{value:.1f}"
                    for value in (
                        stage.weights_gib,
                        stage.gradients_gib,
                        stage.optimizer_gib,
                        max(stage.activations_gib, stage.cast_gib),
                        stage.peak_gib,
                        stage.need_gib,
                    )
                ),
                f"{stage.used_share:.0%}",
            )
        )
    header = ("stage", "weights", "grads", "optimizer", "transient", "peak", "need", "of GPU")
    title = (
        f"GPU memory, GiB per GPU of {plan.memory.stages[0].limit_gib:.0f} (transient: activations, or the optimizer"
        f" step's fp32 gradients if more; peak: what torch counts; need: with CUDA"
        f"{' and the sleeping vLLM' if plan.question.rollout else ''})"
    )
    return _wrapped(title) + "\n" + table(header, rows)


def _host(plan: Plan) -> str:
    nodes = plan.memory.nodes
    rows = [
        (
            f"{node.nodes} x {node.role}",
            *(
                f"{v:.0f}"
                for v in (node.pageable_gb, node.pinned_gb, node.base_gb + node.head_extra_gb + node.rollout_gb)
            ),
            f"{node.physical_gb:.0f}",
            f"{node.reported_gb:.0f}",
            f"{node.used_share:.0%}",
        )
        for node in nodes
    ]
    header = ("nodes", "pageable", "pinned", "processes", "physical", "shown", "of node")
    bars = [f"  {_bar(node)} {node.physical_gb:5.0f}  {_short(node)}" for node in nodes]
    used = [f"{letter} {text}" for letter, text, size in _PARTS if any(size(node) >= 1 for node in nodes)]
    shown = (
        "`used` of free and the like"
        if plan.question.hardware.pinned_counts_as_used
        else ("`used` of free and the like, which leave pinned memory out")
    )
    return "\n".join(
        [
            _wrapped(f"Host memory, GB per node of {nodes[0].limit_gb:.0f} (physical: all bytes; shown: {shown})"),
            table(header, rows),
            *bars,
            _wrapped(", ".join(used) + ", . free", "  "),
        ]
    )


def _short(node: NodeMemory) -> str:
    return node.role.partition(":")[0]


def _bar(node: NodeMemory) -> str:
    text, filled = "", 0.0
    for letter, _, size in _PARTS:
        filled += size(node)
        text += letter * max(0, round(filled / node.limit_gb * _BAR) - len(text))
    return f"[{text[:_BAR].ljust(_BAR, '.')}{'>' if len(text) > _BAR else ']'}"


def _rollout(plan: Plan) -> str:
    r, asked = plan.memory.rollout, plan.question.rollout
    assert r is not None
    assert asked is not None
    lines = [
        f"Rollout: {r.replicas} replicas of {asked.gpus} GPUs (TP {asked.tensor} x DP {asked.data}, EP {asked.expert});"
        f" GB per GPU: {r.budget_gb:.1f} granted, {r.weights_gb:.1f} weights,"
        f" {r.activations_gb + r.overhead_gb:.1f} workspace, {max(0.0, r.kv_gb):.1f} left for"
        f" {r.kv_tokens:,} tokens of KV cache"
    ]
    return "\n".join(_wrapped(line) for line in lines)


def _checkpoint(plan: Plan) -> str:
    c = plan.checkpoint
    parts = ", ".join(f"{name} {_size(size)}" for name, size in c.parts_gb if size >= 1)
    text = f"Checkpoint [{', '.join(c.contents)}]: {_size(c.size_gb)} ({parts}), saved in about"
    text += f" {_duration(plan.segment.timing.save_s)}. {'Lossless' if c.lossless else 'LOSSY'}: {c.note}."
    return _wrapped(text)


def _time(plan: Plan) -> str:
    step, s, q = plan.step, plan.segment, plan.question
    of_grpo = (
        f"generation {step.generation_s:.0f}, weight update {step.update_weights_s:.0f}, training {step.train_s:.0f}:"
        f" log-probabilities {step.log_probs_s:.0f}, "
    )
    parts = (
        (of_grpo if q.rollout else "")
        + f"pipeline {step.update_s:.0f}, Adam and moves {step.optimizer_s:.0f}"
        + (f"; validation {step.validation_s:.0f}, at least" if step.validation_s else "")
    )
    extrapolated = f" Extrapolated: {', '.join(plan.step_extrapolated)}." if plan.step_extrapolated else ""
    speed = f" {step.tokens_per_gpu_s:.1f} tokens per GPU and second over the step"
    if step.generated:
        speed += f", {step.generated_per_gpu_s:.1f} while generating"
    speed += f"; training reaches {step.mfu:.1%} of the GPUs' bf16 peak (MFU)."
    lines = [
        f"Step: {step.steady_s:.0f} s ({parts}); the first of a segment {step.first_s:.0f} s while kernels compile."
        + speed
        + extrapolated,
    ]
    if s.steps:
        lines.append(
            f"Segment: {s.steps} steps in {_duration(s.duration_s)} of {_duration(q.schedule.time_limit_s)}"
            f" ({s.fitting_steps} would fit; {plan.segment_warm.fitting_steps} with a warm kernel cache)."
            f" {s.segments} segments for {q.schedule.steps} steps, {s.node_hours:,.0f} node-hours; {s.goodput:.0%} of"
            f" them train ({s.useful:.0%} without failures), waiting in the queue not counted."
        )
        lines.append(
            f"Saving: a failure every {s.mtbf_h:.0f} h is expected on {q.parallel.nodes} nodes (guessed rate). What"
            f" saves and failures cost together is least with a save every {s.daly_h:.1f} h by Daly's formula"
            f" ({s.young_h:.1f} by Young's): every {s.save_steps} steps, now {q.schedule.save_freq}."
        )
    return "\n".join(_wrapped(line) for line in lines)


def _warnings(plan: Plan) -> str:
    return "\n".join(_wrapped(text, "note: ", "      ") for text in plan.verdict.warnings)


def _recommended(plan: Plan, levers: Sequence[Lever], command: Callable[[Mapping[str, object]], str]) -> str:
    found = recommended(plan, levers)
    return "\n".join(f"{_wrapped('recommended: ' + x.what)}\n    {command(x.variables)}" for x in found)


def _levers(levers: Sequence[Lever]) -> str:
    rows = [
        (
            lever.change,
            f"{lever.gpu_change_gib:+.1f}",
            f"{lever.gpu_gib:.0f}",
            f"{lever.host_change_gb:+.0f}",
            f"{lever.host_gb:.0f}",
            _SAYS[lever.verdict].lower(),
        )
        for lever in levers
    ]
    header = ("What would change it", "GPU GiB", "then", "host GB", "then", "memory")
    settings = [f'  {lever.change}: SET="{lever.setting}"' for lever in levers]
    return table(header, rows) + "\n" + "\n".join(settings)


def _size(gb: float) -> str:
    return f"{gb / 1000:.2f} TB" if gb >= 1000 else f"{gb:.0f} GB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
