"""What a run showed, attempt by attempt: memory of its nodes in the updates, step times of verl's file logger, saves.

Only attempts that trained a step count. verl's own memory metrics are not used: they show the last pipeline stage only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from dsv4kit.checkpoint.inspection import step_directories
from dsv4kit.checkpoint.shard_files import walk_sizes
from dsv4kit.plan.counted.units import GB, MIB
from dsv4kit.plan.fitted.timeline import Window, update_windows
from dsv4kit.run import metrics, node_files, phases, samples
from dsv4kit.run.directory import AttemptDir, RunDir
from dsv4kit.run.files import read_object
from dsv4kit.run.metrics import StepMetrics
from dsv4kit.run.node_files import NodeFiles
from dsv4kit.run.phases import Mark


class Shape(NamedTuple):
    """What has to be known of a run to read its files; `gpu_memory_numa`: NUMA nodes that are not host memory."""

    nodes: int
    has_rollout: bool
    save_freq: int
    gpu_memory_numa: tuple[int, ...] = ()


class NodeSeen(NamedTuple):
    """One node of an attempt.

    `first`, `last`: the places it may have among the nodes in the order of ranks; equal where no node is missing.
    `host_gb`: its peak since training began; None without samples. `gpu_gib`: the peak of each GPU within updates.
    """

    node: str
    first: int
    last: int
    head: bool
    host_gb: float | None
    gpu_gib: tuple[float, ...] = ()


class AttemptSeen(NamedTuple):
    """One attempt that trained so many steps. Times in seconds.

    `fresh`: the run's first, whose first step compiled kernels. `first_s` is that step, `steady` every later one, by
    verl's names. `save_s`: of each save, by what verl timed or else node 0's marks. `why_no_gpu`: why there are no GPU
    peaks, where there are none.
    """

    name: str
    trained: int
    fresh: bool
    nodes: tuple[NodeSeen, ...]
    first_s: float | None
    steady: tuple[Mapping[str, float], ...]
    setup_s: float | None
    save_s: tuple[float, ...]
    why_no_gpu: str = ""


class Observation(NamedTuple):
    """One run. `left_out`: attempts that say nothing, and why; `checkpoint_gb`: the newest one's size on disk."""

    run: str
    attempts: tuple[AttemptSeen, ...]
    left_out: tuple[tuple[str, str], ...]
    checkpoint_gb: float | None = None


def observe(run_dir: Path, shape: Shape) -> Observation:
    """All attempts of the run at `run_dir`."""
    run = RunDir(run_dir)
    found: list[AttemptSeen] = []
    left_out: list[tuple[str, str]] = []
    changed = _changed(run)
    for attempt in run.attempts():
        name = f"{attempt.segment.path.name}/{attempt.path.name}"
        steps = [step for step in metrics.read_metrics(attempt.metrics_file) if step.trained or _timed(step)]
        if not steps:
            left_out.append((name, "trained no step"))
        elif attempt.segment.number < changed:
            left_out.append((name, f"settings were changed from segment {changed} on"))
        else:
            found.append(_attempt(name, attempt, steps, shape, fresh=not found))
    return Observation(run_dir.name, tuple(found), tuple(left_out), _checkpoint_gb(run))


def _timed(step: StepMetrics) -> bool:
    return metrics.STEP_TIME in step.data


def _changed(run: RunDir) -> int:
    """The last segment from which on a resume changed what times or memory go by; 0 for none."""
    harmless = ("schedule.steps", "schedule.time", "schedule.segment_steps", "schedule.spare_segments", "tracking.")
    return max(
        (
            segment.number
            for segment in run.segments()
            if any(not key.startswith(harmless) for key in read_object(segment.changes_file))
        ),
        default=0,
    )


def _attempt(name: str, attempt: AttemptDir, steps: Sequence[StepMetrics], shape: Shape, fresh: bool) -> AttemptSeen:
    marks, _ = phases.parse(_lines(attempt.phases_file))
    timed = [{key: value for key, value in step.data.items() if value is not None} for step in steps]
    began = next((mark.time for mark in marks if mark.phase == phases.STEPS), None)
    whole = all(metrics.STEP_TIME in step for step in timed)
    windows = update_windows(marks, timed if whole else (), shape.has_rollout)
    nodes = tuple(_nodes(attempt, began, windows, shape))
    verls = tuple(step[metrics.SAVE_TIME] for step in timed if metrics.SAVE_TIME in step)
    first, steady = _without_save(timed) if whole else _between_saves(marks, shape.save_freq)
    return AttemptSeen(
        name=name,
        trained=len(steps),
        fresh=fresh,
        nodes=nodes,
        first_s=first,
        steady=steady,
        setup_s=began - marks[0].time if began is not None else None,
        save_s=verls or tuple(b.time - a.time for a, b in pairwise(marks) if a.phase == phases.SAVE),
        why_no_gpu="" if any(node.gpu_gib for node in nodes) else _why_no_gpu(marks, windows),
    )


def _without_save(steps: Sequence[Mapping[str, float]]) -> tuple[float, tuple[Mapping[str, float], ...]]:
    """The first step, and the others, their saves taken out of them."""
    bare = [{**step, metrics.STEP_TIME: step[metrics.STEP_TIME] - step.get(metrics.SAVE_TIME, 0.0)} for step in steps]
    return bare[0][metrics.STEP_TIME], tuple(bare[1:])


def _between_saves(marks: Sequence[Mark], save_freq: int) -> tuple[float | None, tuple[Mapping[str, float], ...]]:
    """The same where verl times no steps (SFT): from one save to the next there are `save_freq`."""
    lengths = [b.time - a.time for a, b in pairwise(marks) if (a.phase, b.phase) == (phases.STEPS, phases.SAVE)]
    steady = [length / save_freq for length in lengths[1:]]
    if not steady:
        return None, ()
    return lengths[0] - (save_freq - 1) * median(steady), tuple({metrics.STEP_TIME: took} for took in steady)


def _why_no_gpu(marks: Sequence[Mark], windows: Sequence[Window]) -> str:
    if not marks:
        return "node 0 left no marks of its phases"
    if not windows:
        return "no save tells when its updates ran, so that vLLM's share of a GPU cannot be told from the trainer's"
    return "no sample of a GPU lies within an update"


def _nodes(attempt: AttemptDir, began: float | None, windows: Sequence[Window], shape: Shape) -> Iterator[NodeSeen]:
    """In the order in which verl places ranks: IP addresses as text."""
    sampled = {node.host: node for node in node_files.sampled(attempt)}
    addresses = {report.host: report.address for report in node_files.reports(attempt)}
    hosts = sorted({*sampled, *addresses}, key=lambda host: (addresses.get(host, ""), host))
    # Without an address nobody knows a node's place, and more nodes than the run has were not all its own.
    placed = all(host in addresses for host in hosts) and len(hosts) <= shape.nodes
    missing = shape.nodes - len(hosts)
    head = _head(attempt)
    for place, host in enumerate(hosts):
        first, last = (place, place + missing) if placed else (0, shape.nodes - 1)
        host_gb, gpus = _peaks(sampled.get(host), began, windows, shape.gpu_memory_numa)
        yield NodeSeen(host, first, last, addresses.get(host, host) == head, host_gb, gpus)


def _head(attempt: AttemptDir) -> str | None:
    """Address of the node that has Ray's head, or where torchrun meets."""
    address = read_object(attempt.ray_head_file).get("address") or read_object(attempt.torchrun_file).get("address")
    return address.rpartition(":")[0] or address if isinstance(address, str) else None


def _peaks(
    node: NodeFiles | None, began: float | None, windows: Sequence[Window], numa: Sequence[int]
) -> tuple[float | None, tuple[float, ...]]:
    if node is None or began is None:
        return None, ()
    times, columns = samples.table(node.samples)
    used = columns.get(samples.MEMORY_USED, [])
    of_gpus = [columns[name] for index in numa if (name := samples.numa_used(index)) in columns]
    host = [
        used[row] - sum(column[row] for column in of_gpus) for row, time in enumerate(times) if used and time >= began
    ]
    rows = [row for row, time in enumerate(times) if any(window.holds(time) for window in windows)]
    gpus = [columns[name] for name in columns if samples.is_gpu(name)]
    peaks = tuple(max(column[row] for row in rows) / 1024 for column in gpus) if rows else ()
    return (max(host) * MIB / GB if host else None), peaks


def _checkpoint_gb(run: RunDir) -> float | None:
    """Size of the newest checkpoint on disk."""
    directory = Path(read_object(run.node_spec_file).get("checkpoint_dir") or run.checkpoints)
    try:
        newest = step_directories(directory)[-1:]
        return sum(sum(walk_sizes(step).values()) for step in newest) / GB or None
    except OSError:
        return None


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except OSError:
        return []
