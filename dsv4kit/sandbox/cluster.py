"""A real Slurm cluster on this machine: the sandbox's public interface."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network
from pathlib import Path

from dsv4kit import hints
from dsv4kit.errors import UserError, nearest
from dsv4kit.sandbox import config, controller, shares
from dsv4kit.sandbox.config import Facts
from dsv4kit.sandbox.host import changes, require_root
from dsv4kit.sandbox.network import Network, controller_address
from dsv4kit.sandbox.node import Node
from dsv4kit.sandbox.packages import require_packages
from dsv4kit.sandbox.spec import SandboxPaths, SandboxSpec, default_root
from dsv4kit.sandbox.state import make_directories, read_record, write_record
from dsv4kit.sandbox.status import NodeStatus, SandboxStatus
from dsv4kit.sandbox.teardown import cgroup_root, tear_down

__all__ = ["Sandbox", "SandboxSpec"]

SLURMCTLD_PORT, SLURMD_PORT = 17817, 17818


class Sandbox:
    """A sandbox that came up. Get one from `Sandbox.up` or `Sandbox.load`; every failure is a `UserError`."""

    def __init__(self, spec: SandboxSpec, subnet: IPv4Network, proctrack: str) -> None:
        self.spec = spec
        self.subnet = subnet
        self.proctrack = proctrack
        self.layout = spec.layout
        self.network = Network(self.layout)

    @classmethod
    def up(cls, spec: SandboxSpec, share: Iterable[Path] = ()) -> Sandbox:
        """Bring the sandbox up and make the directories `share` visible on every node.

        One that is up already and at least as large is returned as it is (a node that died by itself is switched on
        again, one that was powered off on purpose is not); remains of a crash are cleared away first.
        """
        require_root()
        require_packages()
        paths = list(share)
        with changes():
            sandbox = cls.load(spec.name, spec.root)
            if sandbox is not None and controller.is_alive(spec.layout):
                sandbox._require_shape(spec)
                sandbox._revive()
                sandbox._share(paths)
                return sandbox
            for path in paths:
                shares.pairs_for(path)
            tear_down(spec.layout)
            try:
                return cls._build(spec, paths)
            except BaseException:
                tear_down(spec.layout)
                raise

    @classmethod
    def load(cls, name: str = "default", root: Path | None = None) -> Sandbox | None:
        """The sandbox of that name if it came up and was not taken down since; its daemons may have died."""
        layout = SandboxPaths(name, root or default_root())
        record = read_record(layout)
        return None if record is None else cls(*record)

    @classmethod
    def require(cls, name: str = "default") -> Sandbox:
        """Like `load`, but a sandbox that is not up is a `UserError`."""
        sandbox = cls.load(name)
        if sandbox is None:
            raise UserError(f"sandbox {name!r} is not up: `{hints.command('sandbox up', NAME=name)}`")
        return sandbox

    @staticmethod
    def take_down(name: str = "default", *, wipe: bool = False, root: Path | None = None) -> bool:
        """Remove a sandbox in whatever state it is; False when there was nothing to remove. See `tear_down`."""
        require_root()
        with changes():
            return tear_down(SandboxPaths(name, root or default_root()), wipe=wipe)

    def down(self, *, wipe: bool = False) -> None:
        """Take this sandbox down; logs and job numbers stay unless `wipe`."""
        self.take_down(self.spec.name, wipe=wipe, root=self.spec.root)

    @property
    def slurm_conf(self) -> Path:
        return self.layout.slurm_conf

    @property
    def client_env(self) -> dict[str, str]:
        """Variables that Slurm's commands need to reach this cluster."""
        return controller.client_env(self.layout)

    @property
    def alive(self) -> bool:
        """Whether its Slurm answers."""
        return controller.is_alive(self.layout)

    @property
    def node_names(self) -> list[str]:
        return self.spec.node_names

    def address(self, node: str) -> str:
        """The node's IPv4 address."""
        return str(self.subnet[self.node_names.index(self.node(node).name) + 1])

    def node(self, name: str) -> Node:
        if name not in self.node_names:
            valid = ", ".join(self.node_names)
            raise UserError(
                f"sandbox {self.spec.name} has no node {name!r}; it has {valid}{nearest(name, self.node_names)}"
            )
        return Node(self.layout, name)

    def status(self) -> SandboxStatus:
        alive = controller.is_alive(self.layout)
        states = controller.node_states(self.layout) if alive else {}
        cut = self.network.unplugged()
        nodes = [
            NodeStatus(
                name=name,
                address=self.address(name),
                power="on" if self.node(name).is_running else "off",
                network="cut" if name in cut else "up",
                slurm=states.get(name, "unknown"),
            )
            for name in self.node_names
        ]
        return SandboxStatus(
            name=self.spec.name,
            state="up" if alive else "broken",
            slurm_conf=str(self.slurm_conf),
            logs=str(self.layout.state_dir / "log"),
            subnet=str(self.subnet),
            proctrack=self.proctrack,
            gpus_per_node=self.spec.gpus_per_node,
            cpus_per_node=self.spec.cpus_per_node,
            memory_mb=self.spec.node_memory_mb,
            nodes=nodes,
        )

    def share(self, paths: Iterable[Path]) -> None:
        """Make directories of the host visible at the same path on all nodes, now and after a power cycle.

        Only those below /tmp, /run and /dev/shm need it: everything else is shared anyway.
        """
        require_root()
        with changes():
            self._share(list(paths))

    def exec(self, node: str, argv: Sequence[str], *, capture: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, with its own namespaces and this process's environment and terminal."""
        require_root()
        command = self.node(node).enter(argv)
        return subprocess.run(command, env={**os.environ, **self.client_env}, capture_output=capture, text=True)

    def kill_node(self, node: str) -> None:
        """Power a node off: its network first, so that no peer sees a connection closed, then all its processes."""
        require_root()
        with changes():
            target = self.node(node)
            self.layout.off_mark(node).touch()
            self.network.plug(node, up=False)
            target.power_off()

    def start_node(self, node: str) -> None:
        """Power a node on and connect it; returns when Slurm can use it. A running one has its slurmd restored."""
        require_root()
        with changes():
            self._start(self.node(node))

    def partition(self, node: str, up: bool = False) -> None:
        """Cut a node's network, or restore it (`up=True`), on which the node reports to Slurm again.

        What runs on the node goes on running.
        """
        require_root()
        with changes():
            self.network.plug(self.node(node).name, up=up)
            if up:
                self.node(node).announce()

    @classmethod
    def _build(cls, spec: SandboxSpec, paths: list[Path]) -> Sandbox:
        layout = spec.layout
        make_directories(layout, spec.gpus_per_node)
        shares.record(layout, paths)
        controller.start_munged(layout)
        subnet = Network(layout).create(spec.node_names)
        facts = Facts.gather(spec, subnet)
        config.write(spec, facts)
        sandbox = cls(spec, subnet, facts.proctrack)
        controller.start_slurmctld(layout, str(controller_address(subnet)), SLURMCTLD_PORT)
        sandbox._power_on([sandbox.node(name) for name in spec.node_names])
        write_record(layout, spec, subnet, facts.proctrack)
        return sandbox

    def _require_shape(self, spec: SandboxSpec) -> None:
        for key in ("nodes", "gpus_per_node", "cpus_per_node", "memory_mb"):
            here, wanted = getattr(self.spec, key), getattr(spec, key)
            if key == "memory_mb" and wanted:
                here = self.spec.node_memory_mb
            if wanted > here:
                raise UserError(
                    f"sandbox {spec.name} is up with {key} = {here}, not {wanted}:"
                    f" `{hints.command('sandbox down', NAME=spec.name)}` first"
                )

    def _revive(self) -> None:
        dead = [
            node
            for node in map(self.node, self.node_names)
            if not node.is_running and not self.layout.off_mark(node.name).exists()
        ]
        if dead:
            self._power_on(dead)

    def _share(self, paths: list[Path]) -> None:
        shares.record(self.layout, paths)
        for name in self.node_names:
            shares.show(self.node(name), paths)

    def _start(self, node: Node) -> None:
        self.network.plug(node.name, up=True)
        if node.slurmd() is None:
            node.power_off()
            self._power_on([node])
        else:
            node.announce()
            controller.wait_ready(self.layout, [node.name])

    def _power_on(self, nodes: list[Node]) -> None:
        freezer = cgroup_root(self.layout) if self.proctrack == "cgroup" else None
        for node in nodes:
            node.begin_power_on(freezer / node.name if freezer else None)
        for node in nodes:
            node.wait_power_on()
        controller.wait_ready(self.layout, [node.name for node in nodes])
