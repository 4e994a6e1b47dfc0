"""How many nodes it takes: the least on which any layout of a question fits."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.counted.shards import gradient_bytes, state_bytes
from dsv4kit.plan.counted.units import GIB
from dsv4kit.plan.search import Allowed, fits_somehow

_MOST_NODES = 512
# Beside whole numbers of nodes up to eight, the counts that layouts of these models divide into.
_STEPS = (1, 1.25, 1.5, 1.75)


def least_nodes(q: Question, c: Coefficients, allowed: Allowed, least: int = 1, most: int = _MOST_NODES) -> int | None:
    """The least node count, of those tried, that fits with the question's own levers; None where none does.

    Tried are 1 to 8, and powers of two with quarters between, from `least` to `most`.
    """
    totals, levers = geo.totals(q.geometry), q.levers
    static = (2 + gradient_bytes(levers) + state_bytes(levers)) * totals.main
    for nodes in _counts(least, most):
        gpus = nodes * q.parallel.gpus_per_node
        # Not even with every parameter and state on one GPU alone.
        if static / gpus / GIB > q.hardware.hbm_gib:
            continue
        asked = q._replace(parallel=q.parallel._replace(nodes=nodes))
        if fits_somehow(asked, c, allowed):
            return nodes
    return None


def _counts(least: int, most: int) -> Iterator[int]:
    counts = {*range(1, 9)} | {int(2**power * step) for power in range(3, 16) for step in _STEPS}
    return iter(sorted(count for count in counts if least <= count <= most))
