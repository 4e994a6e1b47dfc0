"""What a run showed: peaks of the node sampler's files, and step times of verl's file logger.

verl's own memory metrics are not used: they show the last pipeline stage only.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from dsv4kit.plan.counted.units import GB, MIB

_NODE_FILES = "segments/*/attempt-*/nodes/*.csv"
_METRIC_FILES = "segments/*/attempt-*/metrics*.jsonl"


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
    for path in sorted(run_dir.glob(_NODE_FILES)):
        if peaks := _peaks(path, gpu_memory_numa):
            before = by_node.get(peaks.node)
            by_node[peaks.node] = _higher(before, peaks) if before else peaks
    return Observation(run_dir.name, tuple(by_node.values()), _times(run_dir))


def _higher(one: Peaks, other: Peaks) -> Peaks:
    gpus = [gib for gib in (one.gpu_gib, other.gpu_gib) if gib is not None]
    return Peaks(one.node, max(one.host_gb, other.host_gb), max(gpus, default=None))


def _peaks(path: Path, gpu_memory_numa: Sequence[int]) -> Peaks | None:
    host: list[float] = []
    gpu: list[float] = []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for row in csv.DictReader(file):
            used = _number(row.get("memory_used_mib"))
            if used is None:  # half a last line
                continue
            host.append(used - sum(_number(row.get(f"numa{index}_used_mib")) or 0.0 for index in gpu_memory_numa))
            gpu += [
                value
                for key, text in row.items()
                if isinstance(key, str) and key.startswith("gpu") and (value := _number(text)) is not None
            ]
    if not host:
        return None
    return Peaks(path.stem, max(host) * MIB / GB, max(gpu) / 1024 if gpu else None)


def _number(text: object) -> float | None:
    if not isinstance(text, str) or not text.replace(".", "", 1).isdigit():
        return None
    return float(text)


def _times(run_dir: Path) -> Times | None:
    first: list[float] = []
    steps: list[dict[str, float]] = []
    for path in sorted(run_dir.glob(_METRIC_FILES)):
        records = list(_records(path))
        if records:
            first.append(records[0]["timing_s/step"])
            steps += records[1:]
    if not steps:
        return None
    return Times(
        steady_s=median(_without_save(step) for step in steps),
        generation_s=_median(steps, "timing_s/gen"),
        update_weights_s=_median(steps, "timing_s/update_weights"),
        first_s=first[0] if first else None,
    )


def _without_save(step: dict[str, float]) -> float:
    return step["timing_s/step"] - step.get("timing_s/save_checkpoint", 0.0)


def _median(steps: Sequence[dict[str, float]], name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return median(values) if values else None


def _records(path: Path) -> Iterator[dict[str, float]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            data = json.loads(line)["data"]
            values = {name: float(value) for name, value in data.items() if isinstance(value, int | float)}
        except (ValueError, KeyError, TypeError, AttributeError):  # half a last line
            continue
        if "timing_s/step" in values:
            yield values
