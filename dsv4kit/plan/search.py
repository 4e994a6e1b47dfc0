"""The best legal layouts for given hardware, node count and levers.

Ranked by verdict, then predicted step time, then balance (how much fuller the fullest GPU is than the average one).
Rollout and actor share nothing but the GPUs, so each is searched alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from dsv4kit.errors import UserError
from dsv4kit.plan.core import memory_of
from dsv4kit.plan.counted import checks
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.inputs import Question, RolloutSplit
from dsv4kit.plan.counted.layout import max_pipeline
from dsv4kit.plan.counted.rollout import rollout_memory
from dsv4kit.plan.counted.shards import layout_of
from dsv4kit.plan.counted.step_time import step_time
from dsv4kit.plan.levers import memory_word
from dsv4kit.plan.verdict import Word

_MAX_EXPERT_RANKS = 64


_WORDS = ("fit", "tight", "no")


class Candidate(NamedTuple):
    """One legal layout and what it comes to."""

    question: Question
    layout: str
    verdict: Word
    gpu_need_gib: float
    host_physical_gb: float
    steady_s: float
    imbalance: float

    @property
    def rank(self) -> tuple[float, ...]:
        """Lower is better."""
        short = self.gpu_need_gib if self.verdict == "no" else 0.0
        return _WORDS.index(self.verdict), short, round(self.steady_s), self.imbalance


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def search(
    q: Question, c: Coefficients, allowed: Callable[[Question], bool] = lambda proposed: True, keep: int = 10
) -> tuple[Candidate, ...]:
    """The `keep` best candidates for the question's hardware, nodes, levers and work.

    `allowed` says whether one could be submitted at all; it is asked of the best first, until there are enough.
    """
    rollout = best_rollout(q, c)
    found: list[Candidate] = []
    for asked in _layouts(q._replace(layout=None, rollout=rollout)):
        for variant in (asked, _over_two_ranks(asked)):
            try:
                checks.check(variant)
            except UserError:
                break
            found.append(candidate(variant, c))
            if found[-1].verdict == "fit":
                break
    best = sorted(found, key=lambda x: x.rank)
    return tuple(islice((x for x in best if allowed(x.question)), keep))


def candidate(q: Question, c: Coefficients) -> Candidate:
    """One question as a candidate."""
    memory = memory_of(q, c)
    needs = [stage.need_gib for stage in memory.stages]
    return Candidate(
        question=q,
        layout=layout_of(q),
        verdict=memory_word(memory, c),
        gpu_need_gib=max(needs),
        host_physical_gb=memory.fullest_node.physical_gb,
        steady_s=step_time(q, memory.shares, c).steady_s,
        imbalance=max(needs) * len(needs) / sum(needs),
    )


def _over_two_ranks(q: Question) -> Question:
    """With each sequence over two ranks (CP): memory for communication, whose time is not modelled, hence only where
    memory is short."""
    tokens = -(-q.work.micro_batch_tokens // 2)
    return q._replace(parallel=q.parallel._replace(context=2), work=q.work._replace(micro_batch_tokens=tokens))


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
    """The smallest replica that holds its sequences in the KV cache; the question's own where none does better."""
    if q.rollout is None:
        return None
    best: tuple[tuple[float, ...], RolloutSplit] | None = None
    for tensor in divisors(q.parallel.gpus_per_node):
        for data in divisors(q.parallel.world // tensor):
            rollout = q.rollout._replace(tensor=tensor, data=data, expert=tensor * data)
            try:
                checks.check(q._replace(rollout=rollout))
            except UserError:
                continue
            memory = rollout_memory(q.geometry, q.hardware, rollout, q.work, q.parallel.world, c)
            sequences = -(-q.work.sequences // (memory.replicas * data))
            holds_all = memory.kv_gb >= sequences * memory.sequence_gb
            rank = (not memory.fits, not holds_all, rollout.gpus, tensor)
            if best is None or rank < best[0]:
                best = rank, rollout
    return best[1] if best else q.rollout
