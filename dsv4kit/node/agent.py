"""The agent: our process on every node of a segment, started there by submitit through the batch script's one `srun`.

Every node: the site's setup, preflight, its part of Ray or torchrun, wait until node 0 says it is over, end what was
started. Node 0 also decides where to begin, waits for all nodes, runs the driver, and writes the outcome.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from dsv4kit.node import environment, preflight, processes, setup
from dsv4kit.node.address import AddressError, own_address
from dsv4kit.node.attempt import Attempt
from dsv4kit.node.kernel_cache import KernelCache
from dsv4kit.node.kernel_exchange import KernelExchange
from dsv4kit.node.launcher import Launcher
from dsv4kit.node.launchers import BY_NAME
from dsv4kit.node.lead import Lead
from dsv4kit.node.ray import cluster
from dsv4kit.node.sampler import Sampler
from dsv4kit.node.scratch import Scratch
from dsv4kit.node.stacks import StackReporter
from dsv4kit.run.directory import RunDir
from dsv4kit.run.files import append_json
from dsv4kit.run.node_files import NodeReport
from dsv4kit.run.node_spec import NodeSpec

_POLL_S = 0.25
# For kernels that are just being written, at the end of an attempt.
_KERNELS_S = 20.0


class Agent:
    """One node's part in one attempt."""

    def __init__(
        self, spec: NodeSpec, attempt: Attempt, terminated: threading.Event, cache: KernelCache | None = None
    ) -> None:
        """`terminated`: set once Slurm ends the job. `cache`: None where no compiled kernels are kept."""
        self.spec, self.attempt, self.terminated, self.cache = spec, attempt, terminated, cache
        self.attempt.files.nodes.mkdir(parents=True, exist_ok=True)
        self.scratch = Scratch(cluster.temp_dir(self.spec.scratch_dir, self.attempt.job_id, self.attempt.number))
        caches = cache.environment(os.environ) if cache else {}
        self.env = environment.build(os.environ, self.spec, self.attempt.files, self.scratch.path, caches)
        self.launcher: Launcher | None = None
        self.exchange: KernelExchange | None = None

    def run(self) -> bool:
        """The attempt, from the first check to the last process ended; whether this job makes another one."""
        sampler = Sampler(self.attempt.own.samples, self.spec.sample_interval_s)
        sampler.start()
        reporter = StackReporter(self.attempt, self.scratch.path)
        reporter.start()
        self._make_room()
        self._begin_exchange()
        try:
            if self.attempt.leads:
                Lead(self.spec, self.attempt, self.terminated).run(self._prepare)
            else:
                self._follow()
        finally:
            processes.end_descendants(grace_s=1)  # a raylet would otherwise drain for 30 s, with nothing left to drain
            if self.exchange:
                self.exchange.close(0.0 if self.terminated.is_set() else _KERNELS_S)
            reporter.stop()
            sampler.stop()
            self._clean()
        return self.attempt.again and not self.terminated.is_set()

    def _begin_exchange(self) -> None:
        """Puts compiled kernels in place beside the checks; node 0 tells of them in the attempt's notes."""
        if self.cache is None:
            return

        def tell(line: str) -> None:
            print(f"{socket.gethostname()}: {line}", flush=True)
            if self.attempt.leads:
                append_json(self.attempt.files.phases_file, {"note": line})

        self.exchange = KernelExchange(self.cache, self.attempt, socket.gethostname(), self.spec.nodes, tell)
        self.exchange.begin()

    def _make_room(self) -> None:
        """The attempt's directory in scratch, with the home that `environment.build` falls back to.

        Where scratch is not to be used, the preflight says so.
        """
        with contextlib.suppress(OSError):
            self.scratch.claim()
            if (home := Path(self.env["HOME"])).parent == self.scratch.path:
                home.mkdir(exist_ok=True)
        for line in self.scratch.sweep():
            print(f"{socket.gethostname()}: {line}", flush=True)

    def _prepare(self) -> tuple[NodeReport, Launcher]:
        """The site's setup and this node's checks, told to the others; and what starts its part of the trainer."""
        try:
            self.env = setup.run(self.spec, self.env, self.attempt.own.setup_log)
            report = preflight.check(self.spec, own_address(self.spec.interface), self.attempt.own)
        except (AddressError, setup.SetupError, OSError) as error:
            report = NodeReport(socket.gethostname(), "", [str(error)], time=time.time())
        if self.exchange:
            self.exchange.wait_restored()
        self.attempt.own.report(report)
        self.launcher = BY_NAME[self.spec.launcher](self.spec, self.attempt, self.env, self.scratch.path)
        return report, self.launcher

    def _follow(self) -> None:
        """A node other than 0: plays its part, and stays until the attempt is over."""
        report, launcher = self._prepare()
        able = not report.problems
        while not self.attempt.over and not self.terminated.is_set():
            if able and (failure := launcher.tend(report)):
                self.attempt.own.fail(failure)
                able = False
            time.sleep(_POLL_S)

    def _clean(self) -> None:
        if self.launcher:
            self.launcher.keep_logs()
        self.scratch.remove()


def run_segment(run_dir: str, segment: int) -> None:
    """What submitit runs on every node."""
    print(f"{socket.gethostname()}: agent of segment {segment}, Python {sys.version.split()[0]}", flush=True)
    terminated = threading.Event()

    def terminate(number: int, frame: FrameType | None) -> None:
        """Only records it: a handler can run between any two lines, so it must not write files or end processes."""
        terminated.set()

    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, terminate)
    attempt = Attempt.here(RunDir(Path(run_dir)), segment)
    spec = NodeSpec.load(attempt.run)
    cache, lines = KernelCache.claim(spec)
    for line in lines:
        print(f"{socket.gethostname()}: {line}", flush=True)
    try:
        while Agent(spec, attempt, terminated, cache).run():
            attempt = attempt.following()
            print(f"{socket.gethostname()}: starts again, attempt {attempt.number}", flush=True)
    finally:
        if cache:
            cache.remove()
