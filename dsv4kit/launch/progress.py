"""How far a run is and how well it does: the last values of its curve, and when it should be done."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from dsv4kit.run import metrics, node_files, phases, samples
from dsv4kit.run.directory import RunDir
from dsv4kit.run.metrics import StepMetrics
from dsv4kit.run.reader import AttemptReader

# The rate is that of the last steps: prompts and responses change over a run, and so does the time of a step.
_RECENT_STEPS = 20


@dataclass(frozen=True)
class RunProgress:
    """`step` is the last one trained, saved or not; `step_s` the median of the last 20; `eta_s` leaves queues out.

    `accuracy`: the last validation's numbers by name; `not_numbers`: steps whose reward or loss was none.
    """

    step: int | None = None
    step_s: float | None = None
    eta_s: float | None = None
    pearson: float | None = None
    accuracy: dict[str, float] = field(default_factory=dict)
    not_numbers: list[int] = field(default_factory=list)


def progress_of(
    merged: Sequence[StepMetrics], attempts: Iterable[AttemptReader], total: int, segment_steps: int | None
) -> RunProgress:
    """The progress of a run whose merged curve this is."""
    trained = [step for step in merged if step.trained]
    if not trained:
        return RunProgress()
    rate = step_seconds(trained)
    last = trained[-1].step
    eta = None
    if rate is not None and last < total:
        starts = [took for attempt in attempts if (took := _start_seconds(attempt)) is not None]
        further = max(0, math.ceil((total - last) / segment_steps) - 1) if segment_steps else 0
        eta = (total - last) * rate + further * (median(starts) if starts else 0.0)
    names = (metrics.REWARD, metrics.SFT_LOSS)
    return RunProgress(
        step=last,
        step_s=rate,
        eta_s=eta,
        pearson=_last(trained, metrics.PEARSON),
        accuracy=last_validation(merged),
        not_numbers=[
            step.step for step in merged if any(name in step.data and step.data[name] is None for name in names)
        ],
    )


def step_seconds(trained: Sequence[StepMetrics]) -> float | None:
    """Median seconds of the last steps; None where none tells."""
    took = [value for step in trained[-_RECENT_STEPS:] if (value := step.data.get(metrics.STEP_TIME)) is not None]
    return median(took) if took else None


def last_validation(merged: Sequence[StepMetrics]) -> dict[str, float]:
    """What the last validation found, by verl's names."""
    for step in reversed(merged):
        if found := metrics.of_validation(step):
            return found
    return {}


def _start_seconds(attempt: AttemptReader) -> float | None:
    begins = [mark.time for mark in attempt.marks[:1]]
    trains = [mark.time for mark in attempt.marks if mark.phase == phases.STEPS]
    return trains[0] - begins[0] if begins and trains else None


def _last(trained: Sequence[StepMetrics], name: str) -> float | None:
    return next((value for step in reversed(trained) if (value := step.data.get(name)) is not None), None)


@dataclass(frozen=True)
class Peak:
    """The most that was used of one kind of memory, and where; GiB."""

    gib: float
    node: str


def memory_peaks(run: RunDir) -> dict[str, Peak]:
    """`host` and `GPU`: the highest peaks of the latest attempt that has sampled its nodes."""
    for attempt in reversed(run.attempts()):
        if sampled := node_files.sampled(attempt):
            found: dict[str, Peak] = {}
            for node in sampled:
                for kind, mib in peaks(samples.table(node.samples)[1]).items():
                    if kind not in found or mib / 1024 > found[kind].gib:
                        found[kind] = Peak(round(mib / 1024, 1), node.host)
            return found
    return {}


def peaks(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The highest MiB of a node's memory and of any one of its GPUs."""
    found = {}
    if host := columns.get(samples.MEMORY_USED):
        found["host"] = max(host)
    if gpus := [max(values) for name, values in columns.items() if samples.is_gpu(name) and values]:
        found["GPU"] = max(gpus)
    return found
