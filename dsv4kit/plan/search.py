"""The best legal plans for given hardware, nodes and work: layouts, rollout and memory levers together.

Each layout takes the least change of levers with which it fits. Ranked by verdict, then predicted step time; what is
within the model's own error of the fastest is ordered by how few settings change and how near a measured run is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from dsv4kit.errors import UserError
from dsv4kit.plan.core import Plan, evaluate, memory_of
from dsv4kit.plan.counted import checks
from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.gpu_memory import micro_batches
from dsv4kit.plan.counted.inputs import Question, RolloutSplit
from dsv4kit.plan.counted.layout import max_pipeline
from dsv4kit.plan.counted.rollout import rollout_memory
from dsv4kit.plan.counted.shards import gradient_bytes, state_bytes
from dsv4kit.plan.counted.step_time import step_time
from dsv4kit.plan.counted.units import GB, GIB
from dsv4kit.plan.fitted.calibrated import PUBLISHED, Point, point_of
from dsv4kit.plan.levers import memory_word
from dsv4kit.plan.proposals import changes
from dsv4kit.plan.verdict import Word

_MAX_EXPERT_RANKS = 64
_MAX_UTILIZATION = 0.7
# Less is not worth another row of the table.
_LEAST_GAIN = 0.01
_WORDS = ("fit", "tight", "no")
Allowed = Callable[[Question], bool]


class Candidate(NamedTuple):
    """One legal question and its whole plan; `gain_s` is what a step is shorter by than now, None where now is none.

    `real`: the gain is more than the model's error between two layouts.
    """

    plan: Plan
    gain_s: float | None = None
    real: bool = False

    @property
    def question(self) -> Question:
        """What was asked."""
        return self.plan.question

    @property
    def verdict(self) -> Word:
        """The plan's."""
        return self.plan.verdict.verdict

    @property
    def imbalance(self) -> float:
        """How much fuller the fullest GPU is in the update than the average one."""
        needs = [stage.training_gib for stage in self.plan.memory.stages]
        return max(needs) * len(needs) / sum(needs)


class _Glance(NamedTuple):
    """As much of a plan as ranks it."""

    question: Question
    verdict: Word
    used: float
    steady_s: float

    @property
    def shortness(self) -> tuple[float, ...]:
        """How far from fitting: the verdict, and where it is no, the fullest part in steps of 5 %."""
        return _WORDS.index(self.verdict), round(20 * self.used) if self.verdict == "no" else 0


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def search(
    q: Question,
    c: Coefficients,
    allowed: Allowed = lambda proposed: True,
    keep: int = 10,
    points: Sequence[Point] = PUBLISHED,
    with_levers: bool = True,
) -> tuple[Candidate, ...]:
    """The `keep` best plans for the question's hardware, nodes and work.

    `allowed` says whether one could be submitted at all; it is asked of the best first, until there are enough.
    `with_levers`: where the memory levers may change too.
    """
    found = list(_glances(q._replace(layout=None, rollout=best_rollout(q, c)), c, with_levers))
    ordered = _ordered(found, q, points, c.of("layout_time_error"))
    kept = islice((glance for glance in ordered if allowed(glance.question)), keep)
    return tuple(Candidate(evaluate(glance.question, c, points)) for glance in kept)


def compared(found: Sequence[Candidate], now: Plan | None) -> tuple[Candidate, ...]:
    """The candidates with what each gains over the plan in use."""
    if now is None:
        return tuple(found)
    error = now.coefficients.of("layout_time_error") * now.step.steady_s
    gains = [now.step.steady_s - x.plan.step.steady_s for x in found]
    return tuple(x._replace(gain_s=gain, real=gain > error) for x, gain in zip(found, gains, strict=True))


def fits_somehow(q: Question, c: Coefficients, allowed: Allowed, with_levers: bool = False) -> bool:
    """Whether any layout fits these nodes."""
    asked = q._replace(layout=None, rollout=best_rollout(q, c))
    return any(
        _memory_word(variant, c) not in (None, "no") and allowed(variant)
        for layout in _layouts(asked)
        for variant in _variants(layout, with_levers)
        if not hopeless(variant)
    )


def hopeless(q: Question) -> bool:
    """Whether not even the average stage or node holds its weights, gradients and optimizer state.

    The fullest holds no less, so that such a question needs no plan to be a no.
    """
    g, p, levers = q.geometry, q.parallel, q.levers
    main = geo.totals(g).main
    experts = g.num_layers * geo.layer_expert_params(g)
    held = (main - experts + experts / p.expert) / p.pipeline
    gpu = (2 + gradient_bytes(levers)) * held + state_bytes(levers) * main / p.world
    on_host = 16 * levers.on_cpu * main / p.nodes + (2 * held * p.gpus_per_node if levers.param_offload else 0.0)
    return gpu / GIB > q.hardware.hbm_gib or on_host / GB > q.hardware.host_gb


def _ordered(found: Sequence[_Glance], asked: Question, points: Sequence[Point], error: float) -> Iterator[_Glance]:
    for word in _WORDS:
        some = [glance for glance in found if glance.verdict == word]
        if word == "no":
            yield from sorted(some, key=lambda glance: (glance.used, glance.steady_s))
        elif some:
            within = min(glance.steady_s for glance in some) * (1 + error)
            yield from sorted(
                some,
                key=lambda glance: (
                    (0, _novelty(glance.question, asked, points), glance.steady_s)
                    if glance.steady_s <= within
                    else (1, 0, glance.steady_s)
                ),
            )


def _novelty(q: Question, asked: Question, points: Sequence[Point]) -> int:
    """Settings to change, and in how much of its split it is like no measured run."""
    own = point_of(q)
    names = ("pipeline", "expert", "context", "optimizer", "rollout")
    unlike = (sum(getattr(own, n) != getattr(point, n) for n in names) for point in points)
    return len(changes(asked, q)) + min(unlike, default=len(names))


def _glances(q: Question, c: Coefficients, with_levers: bool) -> Iterator[_Glance]:
    for layout in _layouts(q):
        try:
            checks.check(layout)
        except UserError:
            continue
        nearest: _Glance | None = None
        for variant in _variants(layout, with_levers):
            glance = _glance(variant, c)
            if glance is None:
                continue
            if nearest is None or glance.shortness < nearest.shortness:
                nearest = glance
            if glance.verdict == "fit":
                break
        if nearest:
            yield nearest
            yield from _faster(nearest, c, with_levers)


def _memory_word(q: Question, c: Coefficients) -> Word | None:
    """The verdict on memory; None for a question that breaks a rule."""
    try:
        checks.check(q)
    except UserError:
        return None
    return memory_word(memory_of(q, c), c)


def _glance(q: Question, c: Coefficients) -> _Glance | None:
    try:
        checks.check(q)
    except UserError:
        return None
    memory = memory_of(q, c)
    used = max(memory.fullest_stage.used_share, memory.fullest_node.used_share)
    return _Glance(q, memory_word(memory, c), used, step_time(q, memory.shares, c).steady_s)


def _faster(found: _Glance, c: Coefficients, with_levers: bool) -> Iterator[_Glance]:
    """The same layout with memory spent on time, one way at a time, where it fits and gains something."""
    if not with_levers or found.verdict != "fit":
        return
    for question in _spending(found.question):
        glance = _glance(question, c)
        if glance and glance.verdict == "fit" and glance.steady_s < found.steady_s * (1 - _LEAST_GAIN):
            yield glance


def _spending(q: Question) -> Iterator[Question]:
    """Less of Adam on the CPU; activations kept and not made again; more tokens in a micro-batch, so fewer of them."""
    levers = q.levers
    for fraction in (0.5, 0.25):
        if levers.cpu_offload and fraction < levers.offload_fraction:
            yield q._replace(levers=levers._replace(offload_fraction=fraction))
    if q.training.recompute:
        yield q._replace(training=q.training._replace(recompute=False))
    for times in (2, 4):
        if q.work.packed and micro_batches(q) >= times:
            yield q._replace(work=q.work._replace(micro_batch_tokens=times * q.work.micro_batch_tokens))


def _saving(q: Question) -> Question:
    """Activations made again, and micro-batches of one longest sequence: less memory for more time."""
    tokens = q.work.micro_batch_tokens
    shortest = min(tokens, -(-q.work.sequence_tokens // q.parallel.context)) if q.work.packed else tokens
    return q._replace(training=q.training._replace(recompute=True), work=q.work._replace(micro_batch_tokens=shortest))


def _variants(q: Question, with_levers: bool) -> Iterator[Question]:
    """The question with ever more that saves memory, the user's own first.

    Activations are made again and micro-batches as short as they can be before the optimizer's levers are touched; last
    each sequence goes over two ranks.
    """
    for context in (1, 2):
        if context > 1:
            tokens = -(-q.work.micro_batch_tokens // context)
            q = q._replace(
                parallel=q.parallel._replace(context=context), work=q.work._replace(micro_batch_tokens=tokens)
            )
        yield q
        if with_levers and (saving := _saving(q)) != q:
            q = saving
            yield q
        levers, seen = q.levers, {q.levers}
        steps: tuple[dict[str, object], ...] = (
            {"precision_aware": True},
            {"bf16_gradients": True},
            {"precision_aware": True, "bf16_gradients": True},
            {"precision_aware": True, "bf16_gradients": True, "cpu_offload": True, "offload_fraction": 1.0},
        )
        for step in steps if with_levers else ():
            changed = levers._replace(**step)  # type: ignore[arg-type]
            if changed not in seen:
                seen.add(changed)
                yield q._replace(levers=changed)


def _layouts(q: Question) -> Iterator[Question]:
    p, g = q.parallel, q.geometry
    longest = q.work.micro_batch_tokens * p.context
    experts = [e for e in divisors(g.num_experts) if e <= _MAX_EXPERT_RANKS]
    for pipeline in divisors(p.world):
        if pipeline > max_pipeline(g.num_layers, g.hash_layers):
            break
        for expert in experts:
            if (p.world // pipeline) % expert:
                continue
            yield q._replace(
                parallel=p._replace(pipeline=pipeline, expert=expert, context=1),
                work=q.work._replace(micro_batch_tokens=longest),
            )


def best_rollout(q: Question, c: Coefficients) -> RolloutSplit | None:
    """The question's own replica where it holds its sequences in the KV cache, else the smallest that does.

    Where none does at the GPU share in use, up to 0.7 of a GPU are tried.
    """
    if q.rollout is None:
        return None
    best: tuple[tuple[float, ...], RolloutSplit] | None = None
    shares = sorted({q.rollout.utilization, *(u for u in (0.6, _MAX_UTILIZATION) if u > q.rollout.utilization)})
    for utilization in shares:
        for tensor in divisors(q.parallel.gpus_per_node):
            for data in divisors(q.parallel.world // tensor):
                rollout = q.rollout._replace(tensor=tensor, data=data, expert=tensor * data, utilization=utilization)
                if q.rollout.expert == 1 and rollout.gpus == q.rollout.gpus:
                    rollout = rollout._replace(expert=1)
                if q.geometry.num_experts % rollout.expert:
                    continue
                try:
                    checks.check_rollout(q._replace(rollout=rollout))
                except UserError:
                    continue
                memory = rollout_memory(q.geometry, q.hardware, rollout, q.work, q.parallel.world, c)
                sequences = -(-q.work.sequences // (memory.replicas * data))
                holds_all = memory.kv_gb >= sequences * memory.sequence_gb
                rank = (not memory.fits, not holds_all, rollout != q.rollout, rollout.gpus, tensor)
                if best is None or rank < best[0]:
                    best = rank, rollout
        if best and not best[0][0]:
            break
    return best[1] if best else q.rollout
