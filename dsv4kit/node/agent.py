"""The agent: our process on every node of a segment, started there by submitit through the batch script's one `srun`.

Every node: preflight, Ray, wait until node 0 says it is over, end what was started. Node 0 besides: decide where to
begin, wait for all nodes, run the driver, write the outcome and the verdict.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from dsv4kit.node import environment, preflight, processes, ray_cluster
from dsv4kit.node.address import AddressError, own_address
from dsv4kit.node.attempt import Attempt
from dsv4kit.node.files import tail
from dsv4kit.node.lead import Lead
from dsv4kit.node.sampler import Sampler
from dsv4kit.node.spec import NodeSpec

_POLL_S = 0.25


class Agent:
    """One node's part in one attempt."""

    def __init__(self, run_dir: Path, segment: int) -> None:
        self.spec = NodeSpec.load(run_dir)
        self.attempt = Attempt.here(run_dir, segment)
        self.attempt.node_file("").parent.mkdir(parents=True, exist_ok=True)
        self.env = environment.build(os.environ, self.spec, self.attempt.dir)
        self.temporary = ray_cluster.temp_dir(self.spec.scratch_dir, self.attempt.job_id, self.attempt.number)
        self.terminated = threading.Event()

    def run(self) -> None:
        """The attempt, from the first check to the last process ended."""
        processes.adopt_orphans()
        signal.signal(signal.SIGTERM, self._on_terminate)
        sampler = Sampler(self.attempt.node_file(".csv"), self.spec.sample_interval_s)
        sampler.start()
        try:
            if self.attempt.leads:
                Lead(self.spec, self.attempt, self.env, self.temporary, self.terminated).run(self._preflight)
            else:
                self._follow()
        finally:
            processes.end_descendants(grace_s=1)  # a raylet would otherwise drain for 30 s, with nothing left to drain
            sampler.stop()
            self._clean()

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        """Only notes it: a handler runs between any two lines, which is no place to write files or end processes."""
        self.terminated.set()

    def _preflight(self) -> preflight.NodeReport:
        try:
            report = preflight.check(self.spec, own_address(self.spec.interface), self.attempt.dir)
        except AddressError as error:
            report = preflight.NodeReport(socket.gethostname(), "", [str(error)], time=time.time())
        self.attempt.report(report)
        return report

    def _follow(self) -> None:
        """A node other than 0: joins Ray as soon as there is a head, and stays until the attempt is over."""
        report = self._preflight()
        log = self.attempt.node_file(".ray.log")

        def start() -> subprocess.Popen[bytes]:
            return ray_cluster.start_worker(report.address, self.spec.ray, self.env, self.attempt.dir, log)

        ray = None if report.problems else ray_cluster.Starter(start, self.spec.ray.ready_deadline_s)
        while not self.attempt.over and not self.terminated.is_set():
            if ray and (failure := ray.failure(self.attempt.ready)):
                self.attempt.fail(f"{failure}: {' / '.join(tail(log, 2))}")
                ray = None
            time.sleep(_POLL_S)

    def _clean(self) -> None:
        ray_cluster.keep_logs(self.temporary, self.attempt.dir / "ray-logs" / socket.gethostname())
        shutil.rmtree(self.temporary, ignore_errors=True)


def run_segment(run_dir: str, segment: int) -> None:
    """What submitit runs on every node."""
    print(f"{socket.gethostname()}: agent of segment {segment}, Python {sys.version.split()[0]}", flush=True)
    Agent(Path(run_dir), segment).run()
