"""Slurm's configuration files for one sandbox, rendered from `templates/`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from dsv4kit.sandbox.host import must
from dsv4kit.sandbox.network import controller_address
from dsv4kit.sandbox.spec import SandboxSpec

FREEZER = Path("/sys/fs/cgroup/freezer")
CONTROLLER = "controller"


@dataclass(frozen=True)
class Facts:
    """What the files depend on beyond the spec. `proctrack` is `cgroup` or `linuxproc`."""

    subnet: IPv4Network
    proctrack: str
    slurm_version: tuple[int, int]

    @classmethod
    def gather(cls, spec: SandboxSpec, subnet: IPv4Network) -> Facts:
        proctrack = spec.proctrack
        if proctrack == "auto":
            proctrack = "cgroup" if can_track_by_cgroup() else "linuxproc"
        return cls(subnet, proctrack, parse_version(must(["slurmctld", "-V"])))


def can_track_by_cgroup() -> bool:
    """True where a cgroup v1 freezer is mounted and writable; Slurm needs systemd's help for version 2."""
    return (FREEZER / "cgroup.procs").exists() and (FREEZER / "notify_on_release").exists()


def parse_version(text: str) -> tuple[int, int]:
    """(22, 5) of `slurm-wlm 22.05.8`; (0, 0) when there is no version in it."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def render(spec: SandboxSpec, facts: Facts) -> dict[str, str]:
    """File name below `etc/` -> its text."""
    from dsv4kit.templates import environment

    values = {
        "name": spec.name,
        "state_dir": spec.layout.state_dir,
        "munge_socket": spec.layout.munge_socket,
        "controller_host": CONTROLLER,
        "controller_address": controller_address(facts.subnet),
        "proctrack": facts.proctrack,
        "slurm_version": facts.slurm_version,
        "nodes": [(node, facts.subnet[i]) for i, node in enumerate(spec.node_names, 1)],
        "gpus": spec.gpus_per_node,
        "cpus": spec.cpus_per_node,
        "memory_mb": spec.node_memory_mb,
    }
    names = ("slurm.conf", "gres.conf", "cgroup.conf")
    files = {name: environment().get_template(f"{name}.j2").render(values) for name in names}
    return {**files, "plugstack.conf": "", "hosts": hosts(spec, facts), "nsswitch.conf": nsswitch()}


def hosts(spec: SandboxSpec, facts: Facts) -> str:
    """/etc/hosts of the nodes and of the controller."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", f"{controller_address(facts.subnet)} {CONTROLLER}"]
    return "\n".join([*lines, *(f"{facts.subnet[i]} {node}" for i, node in enumerate(spec.node_names, 1))]) + "\n"


def nsswitch() -> str:
    """This machine's /etc/nsswitch.conf, with names looked up in files alone.

    A node reaches no name server, and each look-up would wait ten seconds to find that out.
    """
    source = Path("/etc/nsswitch.conf")
    lines = source.read_text().splitlines() if source.exists() else []
    return "\n".join(["hosts: files", *(line for line in lines if not line.startswith("hosts:"))]) + "\n"


def write(spec: SandboxSpec, facts: Facts) -> None:
    """Write all of them below the state directory."""
    for name, text in render(spec, facts).items():
        (spec.layout.state_dir / "etc" / name).write_text(text)
