"""torchrun on all nodes, without Ray: every node's agent starts the trainer's processes of its own node.

Node 0 publishes address and target in `torchrun.json` once every node's preflight is through; its own torchrun is the
driver. Node ranks are Slurm's, so neighbours in the network are neighbours in rank. torchrun's static rendezvous tells
the others nothing when the processes of one node die, and they would wait in a collective for hours: the agents tell
each other instead, and node 0 ends the attempt.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dsv4kit.node import driver, ports, processes
from dsv4kit.node.attempt import Attempt
from dsv4kit.node.launcher import AttemptError, Launcher
from dsv4kit.run import ends
from dsv4kit.run.ends import Evidence
from dsv4kit.run.failure_signs import classify
from dsv4kit.run.files import read_json, write_json
from dsv4kit.run.node_files import NodeReport, NodesSeen, ended_first
from dsv4kit.run.node_spec import NodeSpec

_POLL_S = 0.1


class TorchrunLauncher(Launcher):
    """One torchrun per node; `spec.ray.gpus` processes each."""

    def __init__(self, spec: NodeSpec, attempt: Attempt, env: Mapping[str, str], temporary: Path) -> None:
        super().__init__(spec, attempt, env, temporary)
        self._process: subprocess.Popen[bytes] | None = None
        self._told = False

    def tend(self, own: NodeReport) -> str | None:
        """Starts this node's processes when node 0 says so, and tells it when they end badly."""
        if self._process is None:
            if begin := read_json(self.attempt.files.torchrun_file):
                runner = self._runner(own, begin["address"])
                argv = driver.command(self.spec, 0, begin["target"], runner, f"hydra/node{self.attempt.rank}")
                self._process = processes.start(argv, self.env, self.attempt.own.torchrun_log, self.attempt.dir)
        elif not self._told and (status := self._process.poll()):
            self.attempt.own.end(status, time.time())
            self._told = True
        return None

    def bring_up(self, own: NodeReport, target: int, watch: Callable[[], NodesSeen]) -> None:
        """Waits for the preflight of every node, then lets all begin."""
        deadline = time.monotonic() + self.spec.ray.ready_deadline_s + self.spec.setup_limit_s
        while (heard := len(watch().reports)) < self.spec.nodes:
            if time.monotonic() > deadline:
                raise AttemptError(
                    ends.BRING_UP, [f"{self.spec.nodes - heard} of {self.spec.nodes} agents never reported"]
                )
            time.sleep(_POLL_S)
        write_json(self.attempt.files.torchrun_file, {"address": own.address, "target": target})
        self.attempt.declare_ready()

    def runner(self, own: NodeReport) -> Sequence[str]:
        """torchrun as node 0 runs it."""
        return self._runner(own, own.address)

    def interrupted(self) -> str | None:
        """The processes of another node ended badly."""
        return ends.PART_ENDED if ended_first(self.attempt.files) else None

    def evidence(self, exit_status: int | None = None) -> Evidence:
        """From the node whose processes ended first: the others only notice that it is gone."""
        ended = ended_first(self.attempt.files)
        first = ended[0].torchrun_log if ended else self.attempt.files.driver_log
        with first.open(encoding="utf-8", errors="replace") as log:
            found = classify(log, None if ended else exit_status, self.attempt.hosts())
        return Evidence(found.end, [f"{first.name}: {line}" for line in found.lines] if ended else found.lines)

    def _runner(self, own: NodeReport, address: str) -> Sequence[str]:
        return (
            sys.executable,
            "-u",
            "-m",
            "torch.distributed.run",
            f"--nnodes={self.spec.nodes}",
            f"--nproc-per-node={self.spec.ray.gpus}",
            f"--node-rank={self.attempt.rank}",
            "--rdzv-backend=static",
            f"--master-addr={address}",
            f"--master-port={ports.TORCHRUN}",
            f"--local-addr={own.address}",
            "--max-restarts=0",
            f"--log-dir={self.temporary / 'torchrun'}",  # else a torchelastic_* of its own in /tmp, for ever
        )
