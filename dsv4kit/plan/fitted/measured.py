"""What a run showed: peaks of the node sampler's files, and step times of verl's file logger.

verl's own memory metrics are not used: they show the last pipeline stage only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from dsv4kit.plan.counted.units import GB, MIB
from dsv4kit.run import metrics, node_files, samples
from dsv4kit.run.directory import AttemptDir, RunDir
from dsv4kit.run.node_files import NodeFiles


class Peaks(NamedTuple):
    """Peaks of one node: host memory in GB, the fullest of its GPUs in GiB (None where there is none)."""

    node: str
    host_gb: float
    gpu_gib: float | None


class Times(NamedTuple):
    """Seconds; medians over all steps but the first of each attempt. None where verl logged nothing of it."""

    steady_s: float
    generation_s: float | None
    update_weights_s: float | None
    first_s: float | None


class Observation(NamedTuple):
    """One run."""

    run: str
    peaks: tuple[Peaks, ...]
    times: Times | None


def observe(run_dir: Path, gpu_memory_numa: Sequence[int] = ()) -> Observation:
    """Peaks and times of the run at `run_dir`; `gpu_memory_numa` are NUMA nodes that are not host memory."""
    by_node: dict[str, Peaks] = {}
    attempts = RunDir(run_dir).attempts()
    for node in (node for attempt in attempts for node in node_files.sampled(attempt)):
        if peaks := _peaks(node, gpu_memory_numa):
            before = by_node.get(peaks.node)
            by_node[peaks.node] = _higher(before, peaks) if before else peaks
    return Observation(run_dir.name, tuple(by_node.values()), _times(attempts))


def _higher(one: Peaks, other: Peaks) -> Peaks:
    gpus = [gib for gib in (one.gpu_gib, other.gpu_gib) if gib is not None]
    return Peaks(one.node, max(one.host_gb, other.host_gb), max(gpus, default=None))


def _peaks(node: NodeFiles, gpu_memory_numa: Sequence[int]) -> Peaks | None:
    host: list[float] = []
    gpu: list[float] = []
    for row in samples.read(node.samples):
        if samples.MEMORY_USED in row:  # not half a last line
            host.append(row[samples.MEMORY_USED] - sum(row.get(samples.numa_used(i), 0.0) for i in gpu_memory_numa))
            gpu += [value for name, value in row.items() if samples.is_gpu(name)]
    if not host:
        return None
    return Peaks(node.host, max(host) * MIB / GB, max(gpu) / 1024 if gpu else None)


def _times(attempts: Iterable[AttemptDir]) -> Times | None:
    first: list[float] = []
    steps: list[dict[str, float]] = []
    for attempt in attempts:
        records = _records(attempt.metrics_file)
        if records:
            first.append(records[0][metrics.STEP_TIME])
            steps += records[1:]
    if not steps:
        return None
    return Times(
        steady_s=median(_without_save(step) for step in steps),
        generation_s=_median(steps, metrics.GENERATION_TIME),
        update_weights_s=_median(steps, metrics.WEIGHT_SYNC_TIME),
        first_s=first[0] if first else None,
    )


def _without_save(step: dict[str, float]) -> float:
    return step[metrics.STEP_TIME] - step.get(metrics.SAVE_TIME, 0.0)


def _median(steps: Sequence[dict[str, float]], name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return median(values) if values else None


def _records(path: Path) -> list[dict[str, float]]:
    """The steps that were trained and timed."""
    steps = (step.data for step in metrics.read_metrics(path))
    numbers = ({name: value for name, value in data.items() if value is not None} for data in steps)
    return [values for values in numbers if metrics.STEP_TIME in values]
