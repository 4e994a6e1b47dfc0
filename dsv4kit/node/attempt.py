"""One attempt as seen from one of its nodes, and the files through which its agents tell each other where they are."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.run.directory import AttemptDir, RunDir, SegmentDir
from dsv4kit.run.files import read_json, read_object, write_json
from dsv4kit.run.node_files import NodeFiles, NodesSeen, NodesWatch


@dataclass(frozen=True)
class Attempt:
    """One start of a segment on a set of nodes, as seen from the node with Slurm's number `rank`.

    `restarts`: how many attempts this job has made before it.
    """

    run: RunDir
    segment: int
    number: int
    rank: int
    job_id: str
    restarts: int = 0

    @classmethod
    def here(cls, run: RunDir, segment: int) -> Attempt:
        """From what the batch script and Slurm tell this task. A requeued job gets the next attempt number."""
        return cls(
            run,
            segment,
            number=int(os.environ.get("DSV4KIT_ATTEMPT") or os.environ.get("SLURM_RESTART_COUNT") or 0),
            rank=int(os.environ["SLURM_PROCID"]),
            job_id=os.environ["SLURM_JOB_ID"],
        )

    def following(self) -> Attempt:
        """The one that this job makes after it."""
        return dataclasses.replace(self, number=self.number + 1, restarts=self.restarts + 1)

    @property
    def leads(self) -> bool:
        """Node 0 decides, runs the head and the driver, and writes the outcome."""
        return self.rank == 0

    @property
    def segment_dir(self) -> SegmentDir:
        """The segment's directory."""
        return self.run.segment(self.segment)

    @property
    def files(self) -> AttemptDir:
        """The attempt's directory."""
        return self.segment_dir.attempt(self.number)

    @property
    def dir(self) -> Path:
        """Where the attempt's processes start."""
        return self.files.path

    @property
    def own(self) -> NodeFiles:
        """The files only this node writes."""
        return NodeFiles(self.files, socket.gethostname())

    def container_began(self) -> float | None:
        """When this attempt's container began to start; None where it has none of its own (no container, a restart)."""
        began = self.segment_dir.container_began() if self.restarts == 0 else None
        return began if began is not None and began <= time.time() else None

    @property
    def stop_requested(self) -> bool:
        """The batch script saw the time limit coming, or a person made the file."""
        return self.segment_dir.stop_file.exists()

    @functools.cached_property
    def _nodes(self) -> NodesWatch:
        return NodesWatch(self.files)

    def look(self) -> NodesSeen:
        """What the nodes have told so far."""
        return self._nodes.look()

    def hosts(self) -> dict[str, str]:
        """Address -> host name of every node heard of."""
        return {report.address: report.host for report in self.look().reports if report.address}

    def declare_ready(self) -> None:
        """Tells all nodes that every one of them takes part."""
        write_json(self.files.ready_file, {})

    @property
    def ready(self) -> bool:
        """Whether every node takes part."""
        return read_json(self.files.ready_file) is not None

    def finish(self, again: bool = False) -> None:
        """Tells all nodes that the attempt is over, and whether this job makes another one."""
        write_json(self.files.over_file, {"again": again})

    @property
    def over(self) -> bool:
        """Whether node 0 has finished the attempt."""
        return read_json(self.files.over_file) is not None

    @property
    def again(self) -> bool:
        """Whether this job makes another attempt after this one."""
        return read_object(self.files.over_file).get("again") is True
