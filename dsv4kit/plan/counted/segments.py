"""How many steps a segment holds, how often to save, what of the node-hours is training.

Within the time limit: setup, a first step (longer where kernels have to be compiled), steady steps, a save every
`save_freq` steps and at the end, and a tail kept free. Failures come at a constant rate per node; one costs half the
time between saves and a restart. Interval between saves: Young tau = sqrt(2 d M), Daly's refinement of it, with d the
time of a save and M the mean time between failures.
"""

from __future__ import annotations

import math
from typing import NamedTuple


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
    between = min(save_freq, steps or 1) * timing.steady_s
    restart = timing.setup_s + timing.first_s - timing.steady_s
    kept = max(0.0, 1 - (between / 2 + restart) / mtbf_s)
    goodput = useful * kept
    whole = total_steps * timing.steady_s
    return SegmentPlan(
        fitting_steps=fitting,
        steps=steps,
        segments=count,
        duration_s=duration,
        useful=useful,
        goodput=goodput,
        node_hours=nodes * whole / goodput / 3600 if goodput else math.inf,
        mtbf_h=mtbf_s / 3600,
        young_h=young_s(timing.save_s, mtbf_s) / 3600,
        daly_h=daly_s(timing.save_s, mtbf_s) / 3600,
        save_steps=max(1, min(steps or 1, round(daly_s(timing.save_s, mtbf_s) / timing.steady_s))),
        timing=timing,
    )
