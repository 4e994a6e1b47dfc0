"""Memory of the nodes over a run, from the kit's own sampler, beside what the planner said of each.

verl's memory metrics come from the ranks of the last pipeline stage only; stage 0, the fullest, is in these alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dsv4kit.run import node_files, samples
from dsv4kit.run.reader import AttemptReader

# Rows that are read in all: a long run on many nodes has ten million.
_ROWS = 60_000
_LEAST_ROWS = 12
_GIB = 2**30


class NodeMemorySeen(NamedTuple):
    """A node: times in seconds since the epoch, memory in GiB; `planned_*` in GiB, None where nothing was said.

    `role` is the planner's name for what the node holds; `stage_0` whether the first pipeline stage is there.
    """

    node: str
    role: str
    stage_0: bool
    host_peak: float
    gpu_peak: float | None
    planned_host: float | None
    planned_gpu: float | None
    times: list[float]
    host: list[float]
    gpu: list[float | None]


class Memories(NamedTuple):
    """All nodes, in the order in which verl places ranks; `thinned`: only a part of the samples was read."""

    nodes: list[NodeMemorySeen]
    thinned: bool

    def kinds(self, plan: Mapping[str, Any]) -> Iterator[tuple[str, tuple[float | None, float | None], Any]]:
        """Per role: its name, host memory said and seen, GPU memory said and seen."""
        by_role: dict[str, list[NodeMemorySeen]] = {}
        for node in self.nodes:
            by_role.setdefault(node.role, []).append(node)
        for role, nodes in by_role.items():
            if not role:
                continue
            gpus = [node.gpu_peak for node in nodes if node.gpu_peak is not None]
            host = (nodes[0].planned_host, max(node.host_peak for node in nodes))
            yield role, host, (nodes[0].planned_gpu, max(gpus, default=None))


def seen(attempts: Sequence[AttemptReader], plan: Mapping[str, Any]) -> Memories:
    """The nodes' memory over all attempts; a peak between two samples that were read is not seen."""
    files = [(attempt, node) for attempt in attempts for node in node_files.sampled(attempt.directory)]
    rows = max(_LEAST_ROWS, _ROWS // max(1, len(files)))
    by_host: dict[str, list[tuple[float, float, float | None]]] = {}
    thinned = False
    for _, node in files:
        (times, columns), part = samples.thinned(node.samples, rows)
        thinned = thinned or part
        host = columns.get(samples.MEMORY_USED)
        if not host:
            continue
        gpus = [values for name, values in columns.items() if samples.is_gpu(name)]
        fullest: list[float] | list[None] = (
            list(map(max, *gpus)) if len(gpus) > 1 else gpus[0] if gpus else [None] * len(times)
        )
        by_host.setdefault(node.host, []).extend(
            (at, used / 1024, None if gpu is None else gpu / 1024)
            for at, used, gpu in zip(times, host, fullest, strict=True)
        )
    order = _in_order(attempts, list(by_host))
    kinds = _planned(plan)
    return Memories([_node(host, by_host[host], kinds.get(place)) for place, host in enumerate(order)], thinned)


def _in_order(attempts: Sequence[AttemptReader], hosts: list[str]) -> list[str]:
    """By IP address as text, the order in which verl places ranks; nodes without a report last."""
    addresses: dict[str, str] = {}
    for attempt in attempts[-1:]:
        addresses = {report.host: report.address for report in node_files.reports(attempt.directory)}
    return sorted(hosts, key=lambda host: (host not in addresses, addresses.get(host, ""), host))


class _Planned(NamedTuple):
    role: str
    stage_0: bool
    host: float
    gpu: float | None


def _planned(plan: Mapping[str, Any]) -> dict[int, _Planned]:
    """Node number -> what the planner said of such a node."""
    found: dict[int, _Planned] = {}
    stages = {stage["stage"]: stage["need_gib"] for stage in plan.get("gpu", {}).get("stages", [])}
    for kind in plan.get("host", {}).get("nodes", []):
        first = kind["first_node"]
        head = " (Ray's head)" if kind.get("head") else ""
        held = kind.get("stages") or []
        gpu = max((stages[stage] for stage in held if stage in stages), default=None)
        one = _Planned(f"{kind['role']}{head}", 0 in held, kind["physical_gb"] * 1e9 / _GIB, gpu)
        found |= dict.fromkeys(range(first, first + kind["nodes"]), one)
    return found


def _node(host: str, rows: list[tuple[float, float, float | None]], said: _Planned | None) -> NodeMemorySeen:
    rows.sort(key=lambda row: row[0])
    gpus = [gpu for _, _, gpu in rows if gpu is not None]
    return NodeMemorySeen(
        node=host,
        role=said.role if said else "",
        stage_0=said.stage_0 if said else False,
        host_peak=round(max(used for _, used, _ in rows), 1),
        gpu_peak=round(max(gpus), 1) if gpus else None,
        planned_host=round(said.host, 1) if said else None,
        planned_gpu=round(said.gpu, 1) if said and said.gpu is not None else None,
        times=[row[0] for row in rows],
        host=[row[1] for row in rows],
        gpu=[row[2] for row in rows],
    )
