"""The files through which the agents of one attempt tell each other where they are."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.node.preflight import NodeReport
from dsv4kit.run.files import read_json, write_json


@dataclass(frozen=True)
class Attempt:
    """One start of a segment on a set of nodes, as seen from one of them."""

    run_dir: Path
    segment: int
    number: int
    rank: int
    job_id: str

    @classmethod
    def here(cls, run_dir: Path, segment: int) -> Attempt:
        """From what Slurm tells this task. A requeued job gets the next attempt number."""
        return cls(
            run_dir,
            segment,
            number=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            rank=int(os.environ["SLURM_PROCID"]),
            job_id=os.environ["SLURM_JOB_ID"],
        )

    @property
    def leads(self) -> bool:
        """Node 0 decides, runs the head and the driver, and writes the outcome."""
        return self.rank == 0

    @property
    def segment_dir(self) -> Path:
        """`segments/NNNN` of the run."""
        return self.run_dir / "segments" / f"{self.segment:04d}"

    @property
    def dir(self) -> Path:
        """`attempt-N` of the segment."""
        return self.segment_dir / f"attempt-{self.number}"

    def node_file(self, suffix: str) -> Path:
        """A file only this node writes, e.g. `nodes/node1.csv`."""
        return self.dir / "nodes" / f"{socket.gethostname()}{suffix}"

    @property
    def stop_requested(self) -> bool:
        """The batch script saw the time limit coming, or a person wrote the file."""
        return (self.segment_dir / "STOP").exists()

    def report(self, report: NodeReport) -> None:
        """Publishes this node's preflight."""
        write_json(self.node_file(".json"), report.as_dict())

    def reports(self) -> list[NodeReport]:
        """Preflights published so far."""
        contents = [read_json(path) for path in sorted((self.dir / "nodes").glob("*.json"))]
        return [NodeReport(**content) for content in contents if content]

    def hosts(self) -> dict[str, str]:
        """Address -> host name of every node heard of."""
        return {report.address: report.host for report in self.reports() if report.address}

    def fail(self, problem: str) -> None:
        """Tells node 0 that this node cannot go on."""
        self.node_file(".failed").write_text(problem, encoding="utf-8")

    def failures(self) -> dict[str, str]:
        """Host -> problem of every node that gave up."""
        return {path.stem: path.read_text(encoding="utf-8") for path in sorted((self.dir / "nodes").glob("*.failed"))}

    def declare_ready(self) -> None:
        """Tells all nodes that Ray is up on every one of them."""
        write_json(self.dir / "ready.json", {})

    @property
    def ready(self) -> bool:
        """Whether Ray is up on all nodes."""
        return read_json(self.dir / "ready.json") is not None

    def finish(self) -> None:
        """Tells all nodes that the attempt is over."""
        write_json(self.dir / "over.json", {})

    @property
    def over(self) -> bool:
        """Whether node 0 has finished the attempt."""
        return read_json(self.dir / "over.json") is not None
