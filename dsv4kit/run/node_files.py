"""What each node writes about itself, in `nodes/` of an attempt: one file per kind, named by the host.

    <host>.json  its checks (NodeReport)         <host>.csv           memory over time (samples)
    <host>.failed  why it cannot go on           <host>.setup.log     output of the site's setup
    <host>.stacks  what its processes were doing when somebody asked (stacks)
    <host>.ended  its processes ended badly      <host>.ray.log, <host>.torchrun.log

Standard library only; frozen into every run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4kit.run.directory import AttemptDir
from dsv4kit.run.files import read_json, read_object, write_json, write_text

_REPORT, _FAILURE, _ENDED, _SAMPLES, _STACKS = ".json", ".failed", ".ended", ".csv", ".stacks"


@dataclass(frozen=True)
class NodeReport:
    """What one node found out about itself; no problems means it can take part. `facts` are for the doctor.

    `time` is the node's clock when it wrote this, in seconds since the epoch; `slurm_node` what Slurm calls the node,
    which need not be its host name.
    """

    host: str
    address: str
    problems: list[str] = field(default_factory=list)
    memory_available_gib: float = 0.0
    time: float = 0.0
    facts: dict[str, object] = field(default_factory=dict)
    slurm_node: str = ""


@dataclass(frozen=True)
class NodeFiles:
    """The files of one node in one attempt; only that node writes them."""

    attempt: AttemptDir
    host: str

    @property
    def samples(self) -> Path:
        """Memory over time, see `samples`."""
        return self._file(_SAMPLES)

    @property
    def setup_log(self) -> Path:
        """Output of the site's setup commands."""
        return self._file(".setup.log")

    @property
    def ray_log(self) -> Path:
        """Output of Ray's processes."""
        return self._file(".ray.log")

    @property
    def torchrun_log(self) -> Path:
        """Output of the trainer's processes on a node other than 0, under torchrun."""
        return self._file(".torchrun.log")

    @property
    def canary(self) -> Path:
        """Written and deleted to see that it can be."""
        return self.attempt.nodes / f".canary-{self.host}"

    def report(self, report: NodeReport) -> None:
        """Publishes this node's checks."""
        write_json(self._file(_REPORT), asdict(report))

    def fail(self, problem: str) -> None:
        """Tells node 0 that this node cannot go on."""
        write_text(self._file(_FAILURE), problem)

    def end(self, status: int, time: float) -> None:
        """Tells node 0 that this node's processes ended badly, and when (seconds since the epoch)."""
        write_json(self._file(_ENDED), {"status": status, "time": time})

    def answer(self, content: dict[str, object]) -> None:
        """Says what this node's processes are doing."""
        write_json(self._file(_STACKS), content)

    def _file(self, suffix: str) -> Path:
        return self.attempt.nodes / f"{self.host}{suffix}"


@dataclass(frozen=True)
class NodesSeen:
    """What node 0 knows of the nodes at one moment: their reports, by host, and why some cannot go on."""

    reports: list[NodeReport]
    failures: dict[str, str]


class NodesWatch:
    """Node 0's looks at `nodes/`: one listing a look, and each file is read once (a node writes each of them once)."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._reports: dict[str, NodeReport] = {}
        self._failures: dict[str, str] = {}

    def look(self) -> NodesSeen:
        """What is there now."""
        for name in sorted(_names(self._attempt)):
            host, suffix = os.path.splitext(name)
            path = self._attempt.nodes / name
            if suffix == _REPORT and host not in self._reports and (report := _report(read_json(path))):
                self._reports[host] = report
            elif suffix == _FAILURE and host not in self._failures:
                self._failures[host] = path.read_text(encoding="utf-8")
        return NodesSeen(list(self._reports.values()), dict(self._failures))


def reports(attempt: AttemptDir) -> list[NodeReport]:
    """The checks published so far, by host."""
    return NodesWatch(attempt).look().reports


def ended_first(attempt: AttemptDir) -> list[NodeFiles]:
    """The nodes whose processes ended badly, the earliest first."""
    found = []
    for name in _names(attempt):
        host, suffix = os.path.splitext(name)
        if suffix == _ENDED and (content := read_object(attempt.nodes / name)):
            found.append((content["time"], host))
    return [NodeFiles(attempt, host) for _, host in sorted(found)]


def stack_answers(attempt: AttemptDir) -> list[dict[str, Any]]:
    """What each node has last said about its processes."""
    return [read_object(attempt.nodes / name) for name in _names(attempt) if name.endswith(_STACKS)]


def sampled(attempt: AttemptDir) -> list[NodeFiles]:
    """The nodes that have sampled their memory, by host."""
    names = (os.path.splitext(name) for name in sorted(_names(attempt)))
    return [NodeFiles(attempt, host) for host, suffix in names if suffix == _SAMPLES]


def hosts(attempt: AttemptDir) -> list[NodeFiles]:
    """The nodes that have reported or left a log, by host."""
    kinds = (".ray.log", ".setup.log", ".torchrun.log", _REPORT)
    found = {name.removesuffix(kind) for name in _names(attempt) for kind in kinds if name.endswith(kind)}
    return [NodeFiles(attempt, host) for host in sorted(found)]


def _names(attempt: AttemptDir) -> Iterator[str]:
    try:
        with os.scandir(attempt.nodes) as entries:
            yield from (entry.name for entry in entries if not entry.name.startswith("."))
    except OSError:
        return


def _report(content: Any) -> NodeReport | None:
    """Keys of other versions of the kit are ignored."""
    if not isinstance(content, dict):
        return None
    known = {item.name for item in dataclasses.fields(NodeReport)}
    return NodeReport(**{key: value for key, value in content.items() if key in known})
