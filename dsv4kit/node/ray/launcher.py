"""A Ray cluster over all nodes; the driver is one process on node 0 and starts the trainer's processes through it."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dsv4kit.node import ports
from dsv4kit.node.attempt import Attempt
from dsv4kit.node.launcher import AttemptError, Launcher
from dsv4kit.node.ray import cluster
from dsv4kit.run import ends
from dsv4kit.run.driver_log import clean
from dsv4kit.run.files import tail
from dsv4kit.run.node_files import NodeReport, NodesSeen
from dsv4kit.run.node_spec import NodeSpec

_POLL_S = 0.1
# As `ray start --block` names the process that is gone: "gcs_server [exit code=-9]".
_DIED = re.compile(r"\b\w+ \[exit code=-?\d+.*\]$")
# It shows the end of that process's own log behind it.
_DIED_WITHIN = 500


class RayLauncher(Launcher):
    """Head on node 0, a worker on every other node, all started at the same moment."""

    def __init__(self, spec: NodeSpec, attempt: Attempt, env: Mapping[str, str], temporary: Path) -> None:
        super().__init__(spec, attempt, env, temporary)
        self._log = attempt.own.ray_log
        self._worker: cluster.Starter | None = None
        self._head: cluster.Starter | None = None

    def tend(self, own: NodeReport) -> str | None:
        """Joins as soon as there is a head."""

        def start() -> subprocess.Popen[bytes]:
            return cluster.start_worker(own.address, self.spec.ray, self.env, self.attempt.files, self._log)

        self._worker = self._worker or cluster.Starter(start, self.spec.ray.ready_deadline_s)
        failure = self._worker.failure(self.attempt.ready)
        return f"{failure}: {' / '.join(self._dead() or tail(self._log, 2))}" if failure else None

    def _dead(self) -> list[str]:
        """Ray's processes on this node that its log says are gone, with their exit status."""
        found = (_DIED.search(clean(line)) for line in tail(self._log, _DIED_WITHIN))
        return [match[0] for match in found if match]

    def bring_up(self, own: NodeReport, target: int, watch: Callable[[], NodesSeen]) -> None:
        """Starts the head at once; the other nodes' reports come in while it does."""
        readiness: subprocess.Popen[bytes] | None = None

        def start() -> subprocess.Popen[bytes]:
            nonlocal readiness
            common = (self.env, self.attempt.files, self._log)
            readiness = cluster.start_readiness_watch(own.address, self.spec.nodes, self.spec.ray, *common)
            return cluster.start_head(own.address, self.spec.ray, self.temporary, *common)

        head = self._head = cluster.Starter(start, self.spec.ray.ready_deadline_s)
        while readiness is not None and readiness.poll() is None:
            watch()
            if failure := head.failure(cluster_is_ready=False):
                raise AttemptError(ends.BRING_UP, [f"{own.host}: {failure}", *tail(self._log)], [own.host])
            time.sleep(_POLL_S)
        if readiness is None or readiness.returncode != 0:
            self._blame_missing_nodes(own)
        self.attempt.declare_ready()

    def own_failure(self, patience_s: float = 0.0) -> str | None:
        """The head is over. Its `ray start --block` looks once a second whether the GCS and the raylet are there.

        Ray's other processes wait a minute for a dead GCS before they say anything.
        """
        deadline = time.monotonic() + patience_s
        while self._head:
            if failure := self._head.failure(cluster_is_ready=True):
                return "; ".join([f"{failure}, and with it the head", *self._dead()])
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        return None

    def _blame_missing_nodes(self, own: NodeReport) -> None:
        joined = cluster.joined(self.attempt.files)
        if own.address not in joined:  # the others could not join what was not there
            line = f"{own.host}: the Ray head was not up after {self.spec.ray.ready_deadline_s:.0f} s"
            raise AttemptError(ends.BRING_UP, [line, *tail(self._log)], [own.host])
        reports = self.attempt.look().reports
        late = [report.host for report in reports if report.address not in joined]
        silent = self.spec.nodes - len(reports)
        lines = [
            f"not joined after {self.spec.ray.ready_deadline_s:.0f} s: {', '.join(late) or 'nodes without a report'}"
        ]
        if silent:
            lines.append(f"{silent} of {self.spec.nodes} agents never reported")
        raise AttemptError(ends.BRING_UP, lines + tail(self._log), late)

    def driver_env(self, own: NodeReport) -> Mapping[str, str]:
        """Without the address verl would quietly start a Ray of its own on this one node."""
        return {**self.env, "RAY_ADDRESS": f"{own.address}:{ports.GCS}"}

    def keep_logs(self) -> None:
        """Ray's logs lie in node-local scratch."""
        cluster.keep_logs(self.temporary, self.attempt.files.ray_logs(socket.gethostname()))
