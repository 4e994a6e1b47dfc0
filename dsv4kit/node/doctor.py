"""The doctor's visit to the nodes: setup, every check of the preflight, what each node has, and the collectives' speed.

Submitted like a segment, without a run: the same script, container, mounts and environment, so what is well here is
well there. Each node writes its report; node 0 has torchrun measure once all are heard of and none has a problem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

from dsv4kit.node import driver, environment, inventory, preflight, processes, setup
from dsv4kit.node.address import AddressError, own_address
from dsv4kit.node.attempt import Attempt
from dsv4kit.node.launcher import AttemptError
from dsv4kit.node.ray import cluster
from dsv4kit.node.scratch import Scratch
from dsv4kit.node.torchrun import TorchrunLauncher
from dsv4kit.run import outcome
from dsv4kit.run.directory import RunDir
from dsv4kit.run.files import tail, write_json
from dsv4kit.run.node_files import NodeReport, NodesSeen
from dsv4kit.run.node_spec import NodeSpec

_POLL_S = 0.25


class NodeVisit:
    """One node's part. `work`, for messages: what `spec.module` does; it may take `limit_s` seconds."""

    work = "the measurement"
    limit_s = 300.0

    def __init__(self, run: RunDir) -> None:
        self.spec = NodeSpec.load(run)
        self.attempt = Attempt.here(run, 1)
        self.attempt.files.nodes.mkdir(parents=True, exist_ok=True)
        self.scratch = Scratch(cluster.temp_dir(self.spec.scratch_dir, self.attempt.job_id, self.attempt.number))
        with contextlib.suppress(OSError):  # the preflight says so
            self.scratch.claim()
        env = environment.build(os.environ, self.spec, self.attempt.files, self.scratch.path)
        self.report, env = self._examine(env)
        self.attempt.own.report(self.report)
        self.launcher = TorchrunLauncher(self.spec, self.attempt, env, self.scratch.path)
        self.clocks = preflight.clocks()

    def _examine(self, env: dict[str, str]) -> tuple[NodeReport, dict[str, str]]:
        host = os.uname().nodename
        try:
            env = setup.run(self.spec, env, self.attempt.own.setup_log)
            report = preflight.check(self.spec, own_address(self.spec.interface), self.attempt.own)
        except (AddressError, setup.SetupError, OSError) as error:
            report = NodeReport(host, "", [str(error)], time=time.time())
        return dataclasses.replace(report, facts=inventory.facts(self.spec.scratch_dir)), env

    def lead(self) -> None:
        """Node 0: waits for all, measures, and writes what the batch script reads."""
        try:
            self.launcher.bring_up(self.report, 0, self._watch)
            problem = self._work()
        except AttemptError as error:
            problem = "; ".join(error.evidence.lines)
        write_json(self.attempt.files.doctor_file, {"problem": problem})
        outcome.announce_next(outcome.STOP if problem else outcome.FINISHED, self.attempt.segment_dir)
        self.attempt.finish()

    def _watch(self) -> NodesSeen:
        seen = self.attempt.look()
        reports = seen.reports
        off = self.clocks.off(reports, time.time())
        # A bad node does not end the visit before the other nodes have reported.
        if len(reports) == self.spec.nodes and (ill := [report.host for report in reports if report.problems]):
            raise AttemptError("", [f"not measured: {', '.join(ill)} would not take part in a run", *off])
        if off and len(reports) == self.spec.nodes:
            raise AttemptError("", off)
        return seen

    def _work(self) -> str:
        argv = driver.command(self.spec, 0, 0, self.launcher.runner(self.report))
        log = self.attempt.files.driver_log
        process = processes.start(argv, self.launcher.driver_env(self.report), log, self.attempt.dir)
        deadline = time.monotonic() + self.limit_s
        while process.poll() is None and time.monotonic() < deadline and not self.launcher.interrupted():
            time.sleep(_POLL_S)
        try:
            status = process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            processes.end(process)
            status = -1
        if status == 0:
            return ""
        lines = self.launcher.evidence().lines or tail(log, 2)
        return f"{self.work} failed: {' / '.join(lines)}"

    def follow(self) -> None:
        """Another node: takes part in the work, until it is over."""
        while not self.attempt.over:
            if not self.report.problems:
                self.launcher.tend(self.report)
            time.sleep(_POLL_S)


def visit(run_dir: str) -> None:
    """What submitit runs on every node."""
    make(NodeVisit, run_dir)


def make(kind: type[NodeVisit], run_dir: str) -> None:
    """A visit of that kind, from its beginning to its end."""
    print(f"{os.uname().nodename}: {kind.work}, Python {sys.version.split()[0]}", flush=True)
    processes.adopt_orphans()
    here = None
    try:
        here = kind(RunDir(Path(run_dir)))
        if here.attempt.leads:
            here.lead()
        else:
            here.follow()
    finally:
        processes.end_descendants(grace_s=1)
        if here:
            here.scratch.remove()
