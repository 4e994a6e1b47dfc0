"""One node: a set of namespaces with a slurmd in it, switched on and off like a machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from dsv4kit.errors import UserError
from dsv4kit.sandbox import processes
from dsv4kit.sandbox.host import last_line, must, poll, system_env
from dsv4kit.sandbox.network import Network
from dsv4kit.sandbox.processes import Process
from dsv4kit.sandbox.spec import SandboxPaths

POWER_ON_DEADLINE_S = 20
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")


class Node:
    """A node of the sandbox; it need not be running."""

    def __init__(self, layout: SandboxPaths, name: str) -> None:
        self.layout = layout
        self.name = name

    def _inside(self, pid: int) -> Process | None:
        """The node's process that has this pid on the node."""
        found = processes.find(self.layout, self.name)
        return next((process for process in found if processes.namespace_pid(process) == pid), None)

    def init(self) -> Process | None:
        """Pid 1 of the running node."""
        return self._inside(1)

    @property
    def is_running(self) -> bool:
        return self.init() is not None

    def slurmd(self) -> Process | None:
        """The node's slurmd, None when it does not run."""
        init = self.init()
        try:
            return self._inside(int(view(init, "/run/slurmd.pid").read_text())) if init else None
        except (OSError, ValueError):
            return None

    def announce(self) -> None:
        """Have slurmd report to the controller now, which asks a node it holds for down only every few minutes."""
        slurmd = self.slurmd()
        if slurmd:
            processes.send(slurmd, signal.SIGHUP)

    def begin_power_on(self, cgroup: Path | None) -> None:
        """Start the node's first process and return; `wait_power_on` waits for its slurmd. `cgroup`: its freezer."""
        directory = self.layout.node_dir(self.name)
        for name in ("tmp", "run"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / "tmp").chmod(0o1777)
        self.layout.off_mark(self.name).unlink(missing_ok=True)
        if cgroup:
            cgroup.mkdir(parents=True, exist_ok=True)
        environment = {"SLURM_CONF": str(self.layout.slurm_conf), **processes.mark(self.layout, self.name)}
        script = self.layout.state_dir / "bin" / "node_init.sh"
        space = Network(self.layout).namespace(self.name)
        # Without a session, a terminal or a pipe of ours the node outlives this process.
        argv = ["setsid", "--fork", str(script), "power-on", space, str(cgroup or "")]
        must(argv, env=system_env(environment))

    def wait_power_on(self) -> None:
        def settled() -> bool:
            return self.slurmd() is not None or not processes.find(self.layout, self.name)

        poll(settled, POWER_ON_DEADLINE_S)
        if self.slurmd() is None:
            logs = [self.layout.log(self.name), self.layout.log(f"slurmd.{self.name}")]
            log = next((log for log in logs if log.exists() and log.stat().st_size), logs[0])
            raise UserError(f"{self.name} of sandbox {self.layout.name} did not start: {last_line(log)} ({log})")

    def power_off(self) -> None:
        """SIGKILL everything on the node; the kernel ends a pid namespace with its first process."""
        processes.kill_all(self.layout, self.name)

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on the node, in the current directory where the node sees it, else in /."""
        init = self.init()
        if init is None:
            raise UserError(
                f"{self.name} is powered off: `dsv4kit sandbox start-node {self.name} --name {self.layout.name}`"
            )
        try:
            here = os.getcwd()
        except FileNotFoundError:
            here = "/"
        directory = here if same_directory(Path(here), view(init, here)) else "/"
        return ["nsenter", "--target", str(init.pid), *NAMESPACES, "--", "env", "-C", directory, *argv]


def view(init: Process, path: str | Path = "/") -> Path:
    """A path of the node as seen from the host."""
    return Path("/proc", str(init.pid), "root", str(path).lstrip("/"))


def same_directory(first: Path, second: Path) -> bool:
    try:
        return os.path.samestat(first.stat(), second.stat())
    except OSError:
        return False
