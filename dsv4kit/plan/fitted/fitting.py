"""Constants from what a run showed: each from many nodes, GPUs or steps, by their median, so that a few odd ones do not
move it; the interval is how far the middle of them are apart.

A constant is fitted only where the run determines it; `Fit.not_fitted` says why the others are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from dsv4kit.plan.core import Plan, evaluate
from dsv4kit.plan.counted import gpu_phases, step_time
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.gpu_memory import StageMemory
from dsv4kit.plan.counted.host_memory import REFERENCE_GPUS, held_gb
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.fitted.fitted_value import Fitted, as_coefficients
from dsv4kit.plan.fitted.measured import NodeSeen, Observation
from dsv4kit.run import metrics

# Standard deviations of a normal distribution per median absolute deviation, and how many of them an interval spans.
_DEVIATIONS, _WIDTH = 1.4826, 2.0
# An interval is never narrower than this share of its value: two equal samples do not make a constant certain.
_LEAST_SPREAD = 0.02
# Less than this no CUDA context takes; what comes out below it is a fault of the rest of the formula.
_LEAST_CONTEXT_GIB = 0.3


class Residual(NamedTuple):
    """One thing that was measured, and what the planner says of it without and with the fitted constants."""

    what: str
    unit: str
    measured: float
    before: float
    after: float


class Fit(NamedTuple):
    """What came of one run; `not_fitted` is by constant, in words."""

    values: Mapping[str, Fitted]
    not_fitted: Mapping[str, str]
    residuals: tuple[Residual, ...] = ()


class _Samples(NamedTuple):
    """What measured one constant; or why nothing did."""

    name: str
    values: Sequence[float]
    basis: str
    why_not: str = ""


def fit(plan: Plan, seen: Observation) -> Fit:
    """The constants that the run determines, from the plan of its own question with the built-in ones."""
    steps = [step for attempt in seen.attempts for step in attempt.steady]
    refit = _refit(plan, steps)
    found = [*_host(plan, seen), _gpu(plan, seen), refit, *_steps(plan, seen, steps), _saves(plan, seen, refit)]
    values, not_fitted = _concluded([*found, *starts(seen, plan.question.hardware.name)])
    with_fitted = plan.coefficients.with_values(as_coefficients(values, plan.coefficients, "fitted"), "fitted")
    return Fit(values, not_fitted, tuple(_residuals(plan, seen, with_fitted)))


def fit_without_plan(seen: Observation, hardware: str) -> Fit:
    """What a run tells whose model no formula knows: how long starts and saves take."""
    seconds = [took for attempt in seen.attempts for took in attempt.save_s if took > 0]
    size = seen.checkpoint_gb
    why = "no save was seen" if not seconds else "" if size else "no checkpoint is left on disk to be weighed"
    saves = _Samples("save_gb_per_s", [size / took for took in seconds] if size else [], _counted(seconds, "save"), why)
    values, not_fitted = _concluded([saves, *starts(seen, hardware)])
    return Fit(values, {**not_fitted, "memory and the parts of a step": "the model has no geometry to plan with"})


def _concluded(found: Iterable[_Samples]) -> tuple[dict[str, Fitted], dict[str, str]]:
    values, not_fitted = {}, {}
    for x in found:
        if x.values and not x.why_not:
            values[x.name] = _middle(x.values, x.basis)
        else:
            not_fitted[x.name] = x.why_not or "nothing of it was measured"
    return values, not_fitted


def _middle(values: Sequence[float], basis: str) -> Fitted:
    value = median(values)
    spread = _WIDTH * _DEVIATIONS * median(abs(x - value) for x in values)
    spread = max(spread, _LEAST_SPREAD * abs(value))
    return Fitted(value, max(0.0, value - spread), value + spread, basis)


def _counted(values: Sequence[object], what: str) -> str:
    return f"{len(values)} {what}{'' if len(values) == 1 else 's'}"


# Memory.


def _host(plan: Plan, seen: Observation) -> Iterator[_Samples]:
    q = plan.question
    arch, gpus = q.hardware.cpu_architecture, q.parallel.gpus_per_node
    names = f"host_base_gb.{arch}", f"host_head_extra_gb.{arch}"
    held = _held(plan)
    beyond: list[float] = []
    of_head: list[float] = []
    unplaced = 0
    for node in (node for attempt in seen.attempts for node in attempt.nodes if node.host_gb is not None):
        assert node.host_gb is not None
        places = held[node.first : node.last + 1]
        if max(places) - min(places) > 1:
            unplaced += 1
            continue
        (of_head if node.head else beyond).append(node.host_gb - places[0])
    if not (beyond or of_head):
        why = "no memory samples of a node"
        if unplaced:
            why = f"nodes are missing, so that nobody can tell which stage each of {unplaced} held"
        yield from (_Samples(name, (), "", why) for name in names)
        return
    base = median(beyond or of_head)
    if base <= 0:
        why = f"nodes held {-base:.0f} GB less than the formula counts without their processes"
        yield from (_Samples(name, (), "", why) for name in names)
        return
    scale = REFERENCE_GPUS[arch] / gpus
    yield _Samples(names[0], [x * scale for x in beyond or of_head], _counted(beyond or of_head, "node peak"))
    why = "" if beyond and of_head else "the head node, or every other one, left no samples"
    yield _Samples(names[1], [max(0.0, x - base) for x in of_head], _counted(of_head, "peak") + " of head nodes", why)


def _held(plan: Plan) -> tuple[float, ...]:
    rollout = plan.memory.rollout
    return held_gb(plan.question, plan.memory.shares, plan.coefficients, rollout.weights_gb if rollout else 0.0)


def _gpu(plan: Plan, seen: Observation) -> _Samples:
    """One run has one length of micro-batch, so that only a constant can be told from it: it goes into the context."""
    arch = plan.question.hardware.cpu_architecture
    name = f"gpu_context_gib.{arch}"
    peaks = _gpu_peaks(plan, seen)
    if not peaks:
        reasons = {attempt.why_no_gpu for attempt in seen.attempts} - {""}
        return _Samples(name, (), "", "; ".join(sorted(reasons)) or "no node whose stage is known has samples of GPUs")
    context = plan.coefficients.of("gpu_context_gib", arch)
    of_stages = [median(gib) - (_update(plan.memory.stages[stage]) - context) for stage, gib in sorted(peaks.items())]
    why, middle = "", median(of_stages)
    if middle < _LEAST_CONTEXT_GIB:
        why = (
            f"in updates GPUs held {context - middle:.1f} GiB less than the formula counts: not a matter of the context"
        )
    seen_gpus = sum(map(len, peaks.values()))
    return _Samples(name, of_stages, f"{seen_gpus} GPU peaks in updates, {_counted(of_stages, 'stage')}", why)


def _update(stage: StageMemory) -> float:
    return next(phase.need_gib for phase in stage.phases if phase.name == gpu_phases.UPDATE)


def _gpu_peaks(plan: Plan, seen: Observation) -> dict[int, list[float]]:
    """Peaks of the updates by pipeline stage, of the GPUs whose stage is certain."""
    q = plan.question
    found: dict[int, list[float]] = {}
    for node in (node for attempt in seen.attempts for node in attempt.nodes):
        if len(node.gpu_gib) != q.parallel.gpus_per_node:
            continue
        for index, gib in enumerate(node.gpu_gib):
            if (stage := _stage_of(q, node, index)) is not None:
                found.setdefault(stage, []).append(gib)
    return found


def _stage_of(q: Question, node: NodeSeen, gpu: int) -> int | None:
    first, last = (
        (place * q.parallel.gpus_per_node + gpu) // q.parallel.ranks_per_stage for place in (node.first, node.last)
    )
    return first if first == last else None


# Times.


def starts(seen: Observation, hardware: str) -> Iterator[_Samples]:
    """Set-up, and what the first step of a segment takes longer: with an empty kernel cache, and with a full one."""
    setups = [attempt.setup_s for attempt in seen.attempts if attempt.setup_s is not None]
    yield _Samples("setup_s", setups, _counted(setups, "start"), "" if setups else "node 0 left no marks of its phases")
    steady = [step[metrics.STEP_TIME] for attempt in seen.attempts for step in attempt.steady]
    for name, fresh in ((f"first_step_extra_s.{hardware}", True), ("first_step_extra_warm_s", False)):
        of_kind = [attempt for attempt in seen.attempts if attempt.fresh == fresh]
        firsts = [attempt.first_s for attempt in of_kind if attempt.first_s is not None]
        why = "no attempt has a second step" if not steady else ""
        if not firsts and not why:
            why = "the first attempt is not among those that count" if fresh else "only one attempt trained"
        # Against every later step, so that the interval holds what steps differ by.
        extra = [max(0.0, first - step) for first in firsts for step in steady]
        yield _Samples(name, extra, _counted(firsts, "first step"), why)


def _refit(plan: Plan, steps: Sequence[Mapping[str, float]]) -> _Samples:
    q, c = plan.question, plan.coefficients
    took = [step[metrics.WEIGHT_SYNC_TIME] for step in steps if step.get(metrics.WEIGHT_SYNC_TIME)]
    expected = step_time.transfer_s(q, c)
    rates = [c.of("refit_gb_per_s") * expected / seconds for seconds in took]
    why = "" if took else "SFT has no weight update" if q.rollout is None else "no weight update was timed"
    return _Samples("refit_gb_per_s", rates, _counted(rates, "weight update"), why)


def _saves(plan: Plan, seen: Observation, refit: _Samples) -> _Samples:
    """What a save takes beyond the gathering of its weights, at the rate that weight updates had here."""
    q, c = plan.question, plan.coefficients
    took = [seconds for attempt in seen.attempts for seconds in attempt.save_s]
    gather = 0.0
    if "model" in q.contents and not q.dist_checkpoint:
        rate = median(refit.values) if refit.values else c.of("refit_gb_per_s")
        gather = step_time.transfer_s(q, c) * c.of("refit_gb_per_s") / rate
    writing = [seconds - gather for seconds in took]
    why = "" if took else "no save was seen"
    if took and median(writing) <= 0:
        why = (
            f"a save took {median(took):.0f} s, no longer than the gathering of its weights counts for ({gather:.0f} s)"
        )
    rates = [plan.checkpoint.size_gb / seconds for seconds in writing if seconds > 0]
    return _Samples("save_gb_per_s", rates, f"{_counted(rates, 'save')} of {plan.checkpoint.size_gb:.0f} GB", why)


def _steps(plan: Plan, seen: Observation, steps: Sequence[Mapping[str, float]]) -> Iterator[_Samples]:
    """Decoding, and of the rest one of two: Adam on the CPU, or a layer's latency."""
    q, hardware = plan.question, plan.question.hardware.name
    none = "no attempt has a second step" if not steps else ""
    if q.rollout is not None:
        decode = [x for step in steps if (x := _decode_s(plan, step)) is not None]
        name = f"decode_s_per_token.{hardware}"
        yield _Samples(name, decode, _counted(decode, "step"), none or _negative(decode, "generation"))
    rest = [x for step in steps if (x := _rest_s(q, step)) is not None]
    states = step_time.cpu_states(q, plan.memory.shares)
    adam, floor = f"cpu_adam_s_per_parameter.{hardware}", "layer_floor_s"
    if states:
        other = plan.step.train_s - states * plan.coefficients.for_hardware("cpu_adam_s_per_parameter", hardware)
        values = [(seconds - other) / states for seconds in rest]
        yield _Samples(adam, values, _counted(values, "step"), none or _negative(values, "training"))
        yield _Samples(floor, (), "", "with Adam on the CPU the two cannot be told apart; that one was fitted")
    else:
        values = [_floor(plan, seconds) for seconds in rest]
        yield _Samples(floor, values, _counted(values, "step"), none or _negative(values, "training"))
        yield _Samples(adam, (), "", "Adam ran on the GPUs")


def _negative(values: Sequence[float], what: str) -> str:
    if not values:
        return f"no {what} was timed"
    return (
        f"{what} was faster than compute, memory and network alone allow by the formula" if median(values) < 0 else ""
    )


def _decode_s(plan: Plan, step: Mapping[str, float]) -> float | None:
    """Latency of a decode step of the reference model, by the longest response that there was."""
    q, c = plan.question, plan.coefficients
    took = step.get(metrics.GENERATION_TIME)
    if not took or q.rollout is None:
        return None
    longest = step.get(metrics.RESPONSE_LENGTH_MAX) or q.work.response_tokens
    mean = step.get(metrics.RESPONSE_LENGTH) or q.work.mean_response_tokens
    q = q._replace(
        work=q.work._replace(response_tokens=round(longest), mean_response_tokens=round(mean) if mean else None)
    )
    assert q.rollout is not None
    steps, bound = step_time.generation_bound_s(q, q.rollout, c)
    latency = (took - step_time.prefill_s(q, c)) / steps - bound
    return latency * step_time.REFERENCE_LAYERS / q.geometry.num_layers


def _rest_s(q: Question, step: Mapping[str, float]) -> float | None:
    """Seconds of the step that are neither generation nor weight update."""
    if q.rollout is None:
        return step[metrics.STEP_TIME]
    generation, update = step.get(metrics.GENERATION_TIME), step.get(metrics.WEIGHT_SYNC_TIME)
    return step[metrics.STEP_TIME] - generation - update if generation and update else None


def _floor(plan: Plan, seconds: float) -> float:
    """The latency of a layer that makes the training part, Adam on the GPU, take `seconds`."""
    q, c = plan.question, plan.coefficients
    passes = step_time.update_slots(q) + step_time.log_prob_slots(q)
    slot = (seconds - plan.step.optimizer_s) / passes
    return min(
        (slot - step_time.slot_bound_s(q, share, c)) / step_time.layers_of(share) for share in plan.memory.shares
    )


# What is left.


def _residuals(plan: Plan, seen: Observation, fitted: Coefficients) -> Iterator[Residual]:
    after = evaluate(_as_long(plan.question, seen), fitted)
    before = evaluate(after.question, plan.coefficients)
    yield from _memory_residuals(before, after, seen)
    steps = [step for attempt in seen.attempts for step in attempt.steady]
    parts = [
        {
            metrics.STEP_TIME: plan.step.steady_s - plan.step.validation_s,
            metrics.GENERATION_TIME: plan.step.generation_s,
            metrics.WEIGHT_SYNC_TIME: plan.step.update_weights_s,
        }
        for plan in (before, after)
    ]
    for name, what in zip(parts[0], ("step", "generation", "weight update"), strict=True):
        if took := [step[name] for step in steps if name in step]:
            yield Residual(what, "s", median(took), parts[0][name], parts[1][name])
    if took := [seconds for attempt in seen.attempts for seconds in attempt.save_s]:
        yield Residual("save", "s", median(took), before.segment.timing.save_s, after.segment.timing.save_s)


def _as_long(q: Question, seen: Observation) -> Question:
    """The question with the responses that there were."""

    def middle(name: str) -> float | None:
        values = [step[name] for attempt in seen.attempts for step in attempt.steady if name in step]
        return median(values) if values else None

    longest, mean = middle(metrics.RESPONSE_LENGTH_MAX), middle(metrics.RESPONSE_LENGTH)
    if q.rollout is None or not longest:
        return q
    work = q.work._replace(
        response_tokens=round(longest), mean_response_tokens=round(mean) if mean else q.work.mean_response_tokens
    )
    return q._replace(work=work)


def _memory_residuals(before: Plan, after: Plan, seen: Observation) -> Iterator[Residual]:
    held = [_places_gb(plan) for plan in (before, after)]
    by_size: dict[float, list[tuple[float, int]]] = {}
    for attempt in seen.attempts:
        for node in attempt.nodes:
            if node.host_gb is not None and node.first == node.last:
                by_size.setdefault(round(held[0][node.first]), []).append((node.host_gb, node.first))
    for nodes in sorted(by_size.values(), key=lambda nodes: -nodes[0][0]):
        place = nodes[0][1]
        what = f"host, node {place} and its like" if len({p for _, p in nodes}) > 1 else f"host, node {place}"
        yield Residual(what, "GB", median(gb for gb, _ in nodes), held[0][place], held[1][place])
    for stage, gib in sorted(_gpu_peaks(before, seen).items()):
        yield Residual(
            f"GPU of stage {stage}, update",
            "GiB",
            median(gib),
            *(_update(plan.memory.stages[stage]) for plan in (before, after)),
        )


def _places_gb(plan: Plan) -> list[float]:
    """What the plan says each node holds, in rank order."""
    kind = plan.memory.nodes[-1]
    head = plan.memory.nodes[0].head_extra_gb
    return [gb + kind.base_gb + (head if place == 0 else 0.0) for place, gb in enumerate(_held(plan))]
