"""How the trainer's processes come to the nodes of an attempt; a recipe says which way (`recipe.launcher`)."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dsv4kit.node.attempt import Attempt
from dsv4kit.run.ends import Evidence
from dsv4kit.run.failure_signs import classify
from dsv4kit.run.node_files import NodeReport, NodesSeen
from dsv4kit.run.node_spec import NodeSpec


class AttemptError(Exception):
    """The attempt ended before its driver did; carries the reason."""

    def __init__(self, end: str, lines: list[str], excluded: list[str] | None = None) -> None:
        super().__init__(end)
        self.evidence = Evidence(end, lines)
        self.excluded = excluded or []


class Launcher(ABC):
    """One node's part in it: node 0 calls `bring_up` and then runs the driver, every other node calls `tend`."""

    def __init__(self, spec: NodeSpec, attempt: Attempt, env: Mapping[str, str], temporary: Path) -> None:
        """`env` is what every process is started with, `temporary` a node-local directory of the attempt."""
        self.spec, self.attempt, self.env, self.temporary = spec, attempt, env, temporary

    @abstractmethod
    def tend(self, own: NodeReport) -> str | None:
        """A round of a node other than 0: starts what is due; returns why this node cannot go on, or None."""

    @abstractmethod
    def bring_up(self, own: NodeReport, target: int, watch: Callable[[], NodesSeen]) -> None:
        """Node 0: returns once the driver may start. Calls `watch` in each round, which raises to end the attempt.

        Raises AttemptError where the nodes do not come together.
        """

    def runner(self, own: NodeReport) -> Sequence[str]:
        """What stands before `-m MODULE` in the driver's argv on node 0."""
        return (sys.executable, "-u")

    def driver_env(self, own: NodeReport) -> Mapping[str, str]:
        """The driver's environment on node 0."""
        return self.env

    def own_failure(self, patience_s: float = 0.0) -> str | None:
        """Node 0: why its own part of what joins the nodes is over, or None; looked for until `patience_s` is over.

        Whatever the other nodes report then follows from it.
        """
        return None

    def interrupted(self) -> str | None:
        """Node 0, while the driver runs: the class of end that is due because of another node, or None."""
        return None

    def evidence(self, exit_status: int | None = None) -> Evidence:
        """Why the driver ended badly, from what was logged and its exit status."""
        with self.attempt.files.driver_log.open(encoding="utf-8", errors="replace") as log:
            return classify(log, exit_status, self.attempt.hosts())

    def keep_logs(self) -> None:  # noqa: B027 (a launcher may have none)
        """Copies this node's logs out of its scratch."""
