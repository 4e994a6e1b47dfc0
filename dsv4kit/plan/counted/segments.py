"""How many steps a segment holds, how often to save, what of the node-hours is training.

Within the time limit: setup, a first step (longer where kernels have to be compiled), steady steps, a save every
`save_freq` steps and at the end, and a tail kept free. Failures come at a constant rate per node (a Poisson process);
each throws away what was trained since the last save and costs a restart, during which more of them may come: a
stretch of w seconds takes M (exp(w / M) - 1) exp(R / M) on average (Daly 2006), M the mean time between failures, R the
restart. Interval between saves: Young tau = sqrt(2 d M), Daly's refinement of it, with d the time of a save.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# Beyond this many failures between two saves nothing is ever saved.
_HOPELESS = 50


class Timing(NamedTuple):
    """Seconds of everything a segment is made of."""

    steady_s: float
    first_s: float
    setup_s: float
    save_s: float
    tail_s: float


class SegmentPlan(NamedTuple):
    """One segment, and the run made of such; `goodput` is training time over time held, failures included."""

    fitting_steps: int
    steps: int
    segments: int
    duration_s: float
    useful: float
    goodput: float
    node_hours: float
    days: float
    mtbf_h: float
    young_h: float
    daly_h: float
    save_steps: int
    timing: Timing


def duration_s(steps: int, save_freq: int, t: Timing) -> float:
    """From the start of the segment to the end of its last save."""
    if steps <= 0:
        return t.setup_s
    return t.setup_s + t.first_s + (steps - 1) * t.steady_s + math.ceil(steps / save_freq) * t.save_s


def steps_within(limit_s: float, save_freq: int, t: Timing) -> int:
    """The most steps that end, saved, before the limit less the tail."""
    room = limit_s - t.tail_s
    per_round = save_freq * t.steady_s + t.save_s
    low = max(0, math.floor((room - t.setup_s - t.first_s + t.steady_s) / per_round) * save_freq - save_freq)
    steps = low
    while duration_s(steps + 1, save_freq, t) <= room:
        steps += 1
    return steps


def young_s(save_s: float, mtbf_s: float) -> float:
    """Young's first-order interval between checkpoints."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Daly's higher-order interval; the mean time between failures where saves take longer than two of those."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young_s(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def kept_share(between_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of the time that is not lost to failures, with `between_s` from save to save."""
    exponent, restart = between_s / mtbf_s, restart_s / mtbf_s
    if exponent + restart > _HOPELESS:
        return 0.0
    return exponent / math.expm1(exponent) * math.exp(-restart) if exponent else math.exp(-restart)


def segment_plan(
    *,
    timing: Timing,
    limit_s: float,
    total_steps: int,
    segment_steps: int,
    save_freq: int,
    nodes: int,
    failures_per_node_day: float,
) -> SegmentPlan:
    """Segments of a run of `total_steps`, each of at most `segment_steps` and of what fits the limit."""
    fitting = steps_within(limit_s, save_freq, timing)
    steps = min(fitting, segment_steps, total_steps)
    count = math.ceil(total_steps / steps) if steps else 0
    duration = duration_s(steps, save_freq, timing)
    useful = steps * timing.steady_s / duration if steps else 0.0
    mtbf_s = 86400 / (failures_per_node_day * nodes)
    between = min(save_freq, steps or 1) * timing.steady_s + timing.save_s
    restart = timing.setup_s + timing.first_s - timing.steady_s
    goodput = useful * kept_share(between, restart, mtbf_s)
    whole = total_steps * timing.steady_s
    return SegmentPlan(
        fitting_steps=fitting,
        steps=steps,
        segments=count,
        duration_s=duration,
        useful=useful,
        goodput=goodput,
        node_hours=nodes * whole / goodput / 3600 if goodput else math.inf,
        days=whole / goodput / 86400 if goodput else math.inf,
        mtbf_h=mtbf_s / 3600,
        young_h=young_s(timing.save_s, mtbf_s) / 3600,
        daly_h=daly_s(timing.save_s, mtbf_s) / 3600,
        save_steps=max(1, min(steps or 1, round(daly_s(timing.save_s, mtbf_s) / timing.steady_s))),
        timing=timing,
    )
