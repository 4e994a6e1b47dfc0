"""What could be changed, and what each change would do to the fullest GPU and the fullest node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from dsv4kit.errors import UserError
from dsv4kit.plan.core import Memory, Plan, memory_of
from dsv4kit.plan.counted import checks
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.counted.units import GB, GIB
from dsv4kit.plan.proposals import as_set, changes
from dsv4kit.plan.verdict import Word, gpu_word, host_word, worst

_MAX_UTILIZATION = 0.7


class Lever(NamedTuple):
    """One change: how to make it, and what the fullest GPU (in the update) and node would then hold."""

    change: str
    setting: str
    gpu_gib: float
    gpu_change_gib: float
    host_gb: float
    host_change_gb: float
    verdict: Word


def levers(plan: Plan, allowed: Callable[[Question], bool] = lambda changed: True) -> tuple[Lever, ...]:
    """Changes that help a GPU or a node, the most helpful first.

    `allowed` says whether what a change comes to could be submitted; a change that could not is left out.
    """
    q, c = plan.question, plan.coefficients
    rollout = plan.memory.rollout
    proposed = _changes(q, rollout_fits=rollout is None or rollout.fits)
    helpful = [(changed, lever) for words, changed in proposed if (lever := _effect(plan, words, changed, c))]
    found = [lever for changed, lever in helpful if allowed(changed)]
    return tuple(
        sorted(
            found,
            key=lambda lever: (
                _rank(lever.verdict),
                lever.host_change_gb / q.hardware.host_gb + lever.gpu_change_gib / q.hardware.hbm_gib,
            ),
        )
    )


def _rank(word: Word) -> int:
    return ("fit", "tight", "no").index(word)


def memory_word(memory: Memory, c: Coefficients) -> Word:
    """Verdict on memory alone."""
    words: list[Word] = [gpu_word(stage) for stage in memory.stages]
    words += [host_word(node, c) for node in memory.nodes]
    if memory.rollout:
        words.append(memory.rollout.word)
    return worst(words)


def _effect(plan: Plan, change: str, q: Question, c: Coefficients) -> Lever | None:
    before = plan.memory
    try:
        checks.check(q)
        after = memory_of(q, c)
    except UserError:  # not a legal change here
        return None
    gpu, host = after.training_gib, _host_gb(after)
    gpu_change, host_change = gpu - before.training_gib, host - _host_gb(before)
    roomier = bool(after.rollout and before.rollout and after.rollout.kv_tokens > before.rollout.kv_tokens)
    if gpu_change > -0.5 and host_change > -1 and not roomier:
        return None
    setting = as_set(changes(plan.question, q))
    return Lever(change, setting, gpu, gpu_change, host, host_change, memory_word(after, c))


def _host_gb(memory: Memory) -> float:
    return memory.fullest_node.physical_gb + memory.fullest_node.object_store_gb


def _changes(q: Question, rollout_fits: bool) -> Iterator[tuple[str, Question]]:
    """Every change in words, and the question it makes."""
    lever, p, r = q.levers, q.parallel, q.rollout
    if not lever.precision_aware:
        yield (
            "precision-aware optimizer",
            q._replace(levers=lever._replace(precision_aware=True)),
        )
    if not lever.bf16_gradients:
        yield (
            "bf16 gradient buffers",
            q._replace(levers=lever._replace(bf16_gradients=True)),
        )
    if not (lever.precision_aware or lever.bf16_gradients):
        yield (
            "precision-aware optimizer and bf16 gradient buffers",
            q._replace(levers=lever._replace(precision_aware=True, bf16_gradients=True)),
        )
    if not (lever.cpu_offload or (lever.precision_aware and lever.bf16_gradients)):
        yield (
            "precision-aware, bf16 gradients, Adam on the CPU",
            q._replace(levers=lever._replace(precision_aware=True, bf16_gradients=True, cpu_offload=True)),
        )
    if not lever.cpu_offload:
        yield (
            "Adam on the CPU",
            q._replace(levers=lever._replace(cpu_offload=True, offload_fraction=1.0)),
        )
    for fraction in (1.0, 0.75, 0.5):
        if lever.cpu_offload and fraction != lever.offload_fraction:
            yield (
                f"{fraction:.0%} of Adam on the CPU",
                q._replace(levers=lever._replace(offload_fraction=fraction)),
            )
    if lever.pinned_round_threshold_mb is None:
        yield (
            "pinned tensors not rounded up (untested)",
            q._replace(levers=lever._replace(pinned_round_threshold_mb=64)),
        )
    if lever.object_store_gib > 32:
        saved = (lever.object_store_gib - 32) * GIB / GB
        yield (
            f"Ray's object store at 32 GiB ({saved:.0f} GB less)",
            q._replace(levers=lever._replace(object_store_gib=32)),
        )
    if q.layout is not None:
        yield "the generated layout", q._replace(layout=None)
    yield (
        f"EP {2 * p.expert}",
        q._replace(parallel=p._replace(expert=2 * p.expert)),
    )
    yield (
        f"PP {2 * p.pipeline}",
        q._replace(layout=None, parallel=p._replace(pipeline=2 * p.pipeline)),
    )
    yield (
        f"CP {2 * p.context}",
        q._replace(
            parallel=p._replace(context=2 * p.context),
            work=q.work._replace(micro_batch_tokens=-(-q.work.micro_batch_tokens // 2)),
        ),
    )
    yield f"{2 * p.nodes} nodes", q._replace(parallel=p._replace(nodes=2 * p.nodes))
    for times in (2, 4):
        nodes, pipeline = times * p.nodes, times * p.pipeline
        yield (
            f"{nodes} nodes with PP {pipeline}",
            q._replace(layout=None, parallel=p._replace(nodes=nodes, pipeline=pipeline)),
        )
    if r and not rollout_fits:
        yield (
            f"rollout DP {2 * r.data}",
            q._replace(rollout=r._replace(data=2 * r.data, expert=1 if r.expert == 1 else 2 * r.gpus)),
        )
        utilization = round(min(_MAX_UTILIZATION, r.utilization + 0.1), 2)
        if utilization > r.utilization:
            yield (
                f"rollout memory share {utilization:g}",
                q._replace(rollout=r._replace(utilization=utilization)),
            )
