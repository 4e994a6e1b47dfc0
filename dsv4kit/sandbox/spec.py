"""What a sandbox should look like, and where it keeps its state."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dsv4kit.errors import UserError

ROOT_VARIABLE = "DSV4KIT_SANDBOX_ROOT"
Proctrack = Literal["auto", "cgroup", "linuxproc"]

# `sun_path` is 108 bytes with its closing NUL (man 7 unix).
_SOCKET_PATH_BYTES = 107
_LIMITS = {"nodes": (1, 64), "gpus_per_node": (0, 16), "cpus_per_node": (1, 512)}


def default_root() -> Path:
    """The directory that holds one state directory per sandbox (`DSV4KIT_SANDBOX_ROOT` overrides it)."""
    return Path(os.environ.get(ROOT_VARIABLE) or "/var/lib/dsv4kit/sandbox")


def host_memory_mb() -> int:
    """MemTotal of this machine in MiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) // 1024
    raise UserError("/proc/meminfo has no MemTotal line; give memory_mb")


@dataclass(frozen=True)
class SandboxSpec:
    """The shape of a sandbox. Raises `UserError` when a value is out of range.

    `memory_mb` (MiB per node) of 0 means an equal share of this machine's memory. CPUs and memory are what the nodes
    claim, not a limit on what jobs use. `proctrack="auto"` takes the cgroup tracker wherever it can work.
    """

    name: str = "default"
    nodes: int = 4
    gpus_per_node: int = 1
    cpus_per_node: int = 8
    memory_mb: int = 0
    proctrack: Proctrack = "auto"
    root: Path = field(default_factory=default_root)

    def __post_init__(self) -> None:
        check_name(self.name)
        for key, (low, high) in _LIMITS.items():
            value = getattr(self, key)
            if not low <= value <= high:
                raise UserError(f"sandbox {self.name}: {key} = {value} is not between {low} and {high}")
        if self.memory_mb and self.memory_mb < 64:
            raise UserError(f"sandbox {self.name}: memory_mb = {self.memory_mb} is less than 64")

    @property
    def node_names(self) -> list[str]:
        return [f"node{i}" for i in range(1, self.nodes + 1)]

    @property
    def node_memory_mb(self) -> int:
        """MiB that one node claims."""
        return self.memory_mb or max(64, host_memory_mb() // self.nodes)

    @property
    def layout(self) -> SandboxPaths:
        return SandboxPaths(self.name, self.root)


def check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?", name):
        raise UserError(f"sandbox name {name!r}: 1 to 24 of a-z, 0-9 and inner '-' are allowed")


@dataclass(frozen=True)
class SandboxPaths:
    """Every path and name that belongs to one sandbox; all derive from its state directory."""

    name: str
    root: Path

    def __post_init__(self) -> None:
        check_name(self.name)
        # slurm.conf takes these paths unquoted, and a socket has to fit below them.
        if not re.fullmatch(r"/[A-Za-z0-9_.+@/-]*", str(self.root)) or ".." in self.root.parts:
            raise UserError(
                f"{ROOT_VARIABLE} = {str(self.root)!r}: must be an absolute path of letters, digits and _ . + @ / -"
            )
        excess = len(bytes(self.munge_socket)) - _SOCKET_PATH_BYTES
        if excess > 0:
            raise UserError(
                f"{ROOT_VARIABLE} = {self.root}: {excess} bytes too long for the unix socket {self.munge_socket}"
            )

    @property
    def state_dir(self) -> Path:
        return Path(os.path.normpath(self.root)) / self.name

    @property
    def tag(self) -> str:
        """Prefix of this sandbox's links, network namespaces and cgroup; short, as a link name has 15 characters."""
        return "d4k" + hashlib.sha256(bytes(self.state_dir)).hexdigest()[:8]

    @property
    def slurm_conf(self) -> Path:
        return self.state_dir / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.state_dir / "run" / "munge.sock"

    @property
    def record(self) -> Path:
        """Written when the sandbox is up, removed when it goes down."""
        return self.state_dir / "sandbox.json"

    @property
    def ownership(self) -> Path:
        """Exists in a state directory that a sandbox made; without it nothing there is ever changed or removed."""
        return self.state_dir / ".dsv4kit-sandbox"

    @property
    def shares(self) -> Path:
        return self.state_dir / "run" / "shares"

    def log(self, name: str) -> Path:
        return self.state_dir / "log" / f"{name}.log"

    def node_dir(self, node: str) -> Path:
        return self.state_dir / "nodes" / node

    def off_mark(self, node: str) -> Path:
        """Exists while a node was powered off on purpose."""
        return self.state_dir / "run" / f"{node}.off"
