"""One question, one plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dsv4kit.plan.counted import checks
from dsv4kit.plan.counted.checkpoint_size import CheckpointSize, checkpoint_size
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.gpu_memory import StageMemory, stage_memory
from dsv4kit.plan.counted.host_memory import NodeMemory, node_memory
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.counted.rollout import RolloutMemory, rollout_memory
from dsv4kit.plan.counted.segments import SegmentPlan, Timing, segment_plan
from dsv4kit.plan.counted.shards import Share, layout_of, shares
from dsv4kit.plan.counted.step_time import StepTime, step_time, transfer_s
from dsv4kit.plan.fitted.calibrated import CARD, MEMORY, PUBLISHED, TIME, Point, beyond, extrapolated
from dsv4kit.plan.verdict import Verdict, judge


class Memory(NamedTuple):
    """What is held where."""

    shares: tuple[Share, ...]
    stages: tuple[StageMemory, ...]
    nodes: tuple[NodeMemory, ...]
    rollout: RolloutMemory | None

    @property
    def fullest_stage(self) -> StageMemory:
        """The stage whose GPUs need most."""
        return max(self.stages, key=lambda stage: (stage.need_gib, stage.training_gib))

    @property
    def training_gib(self) -> float:
        """What the update takes on the fullest GPU."""
        return max(stage.training_gib for stage in self.stages)

    @property
    def fullest_node(self) -> NodeMemory:
        """The kind of node that holds most."""
        return max(self.nodes, key=lambda node: node.physical_gb)


class Plan(NamedTuple):
    """Everything the planner knows about one question; `.._extrapolated` says in what it is like no measured run."""

    question: Question
    coefficients: Coefficients
    layout: str
    memory: Memory
    checkpoint: CheckpointSize
    step: StepTime
    segment: SegmentPlan
    segment_warm: SegmentPlan
    verdict: Verdict
    memory_extrapolated: tuple[str, ...]
    step_extrapolated: tuple[str, ...]

    @property
    def steady_interval_s(self) -> tuple[float, float]:
        """What a steady step is believed to take, at least and at most."""
        error = self.coefficients.of("time_error_extrapolated" if self.step_extrapolated else "time_error_measured")
        return self.step.steady_s * (1 - error), self.step.steady_s * (1 + error)

    @property
    def days_interval(self) -> tuple[float, float]:
        """What the run is believed to take, at least and at most: step, start, save and failures, each for itself."""
        q, c, now, timing = self.question, self.coefficients, self.segment.days, self.segment.timing
        low, high = self.steady_interval_s
        first = "first_step_extra_warm_s" if q.schedule.warm_jit else "first_step_extra_s"
        kin = None if q.schedule.warm_jit else c.kin(first, q.hardware.name)
        saved = self.checkpoint.size_gb / c.of("save_gb_per_s")
        failures = "failures_per_node_day"
        ends = []
        for end, step in ((0, low), (1, high)):
            sign = 1 if end else -1
            rate_of_saves = c.of("save_gb_per_s") - sign * c.spread("save_gb_per_s")[1 - end]
            worse = (
                timing._replace(steady_s=step, first_s=timing.first_s + step - timing.steady_s),
                timing._replace(setup_s=timing.setup_s + sign * c.spread("setup_s")[end]),
                timing._replace(first_s=timing.first_s + sign * c.spread(first, kin)[end]),
                timing._replace(save_s=timing.save_s + self.checkpoint.size_gb / rate_of_saves - saved),
            )
            rate = c.of(failures) + sign * c.spread(failures)[end]
            days = [_with_timing(q, x, c.of(failures)).days for x in worse] + [_with_timing(q, timing, rate).days]
            ends.append(now + sign * math.hypot(*(day - now for day in days)) if math.isfinite(now) else now)
        return max(0.0, ends[0]), ends[1]


def memory_of(q: Question, c: Coefficients) -> Memory:
    """Memory of every stage, node and rollout worker."""
    held = shares(q)
    rollout = rollout_memory(q.geometry, q.hardware, q.rollout, q.work, q.parallel.world, c) if q.rollout else None
    return Memory(
        shares=held,
        stages=tuple(stage_memory(q, share, c, rollout.weights_gb if rollout else 0.0) for share in held),
        nodes=node_memory(q, held, c, rollout.weights_gb if rollout else 0.0),
        rollout=rollout,
    )


def save_s(q: Question, checkpoint: CheckpointSize, c: Coefficients) -> float:
    """Seconds of one save; the Hugging Face tree is gathered like a weight update before it is written."""
    gather = transfer_s(q, c) if "model" in q.contents and not q.dist_checkpoint else 0.0
    return gather + checkpoint.size_gb / c.of("save_gb_per_s")


def _segments(q: Question, step: StepTime, checkpoint: CheckpointSize, c: Coefficients, warm: bool) -> SegmentPlan:
    timing = Timing(
        steady_s=step.steady_s,
        first_s=step.first_warm_s if warm else step.first_s,
        setup_s=c.of("setup_s"),
        save_s=save_s(q, checkpoint, c),
        tail_s=c.of("tail_s"),
    )
    return _with_timing(q, timing, c.of("failures_per_node_day"))


def _with_timing(q: Question, timing: Timing, failures_per_node_day: float) -> SegmentPlan:
    return segment_plan(
        timing=timing,
        limit_s=q.schedule.time_limit_s,
        total_steps=q.schedule.steps,
        segment_steps=q.schedule.segment_steps,
        save_freq=q.schedule.save_freq,
        nodes=q.parallel.nodes,
        failures_per_node_day=failures_per_node_day,
    )


def evaluate(q: Question, c: Coefficients, points: Sequence[Point] = PUBLISHED) -> Plan:
    """The plan for `q`; a `UserError` where the question breaks a rule."""
    checks.check(q)
    memory = memory_of(q, c)
    step = step_time(q, memory.shares, c)
    checkpoint = checkpoint_size(q)
    cold, warm = (_segments(q, step, checkpoint, c, warm=warm) for warm in (False, True))
    segment = warm if q.schedule.warm_jit else cold
    kin = c.kin("decode_s_per_token", q.hardware.name)
    return Plan(
        question=q,
        coefficients=c,
        layout=layout_of(q),
        memory=memory,
        checkpoint=checkpoint,
        step=step,
        segment=segment,
        segment_warm=warm,
        verdict=judge(q, memory.stages, memory.nodes, memory.rollout, segment, c),
        memory_extrapolated=(*extrapolated(q, points, MEMORY, kin), *beyond(q, points)),
        step_extrapolated=extrapolated(q, (*points, CARD), TIME, kin),
    )
