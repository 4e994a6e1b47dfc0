"""What a sandbox is doing, for a table and for `--json`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsv4kit.text_table import aligned


@dataclass(frozen=True)
class NodeStatus:
    """`power`: on or off; `network`: up or cut; `slurm`: the state Slurm sees (`unknown` without a controller)."""

    name: str
    address: str
    power: str
    network: str
    slurm: str


@dataclass(frozen=True)
class SandboxStatus:
    """`state`: up, or broken when a daemon of the controller has died. Memory in MiB per node."""

    name: str
    state: str
    slurm_conf: str
    logs: str
    subnet: str
    proctrack: str
    gpus_per_node: int
    cpus_per_node: int
    memory_mb: int
    nodes: list[NodeStatus]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def table(self) -> str:
        columns = ["NODE", "ADDRESS", "POWER", "NETWORK", "SLURM"]
        rows = [columns, *([n.name, n.address, n.power, n.network, n.slurm] for n in self.nodes)]
        shape = f"{self.gpus_per_node} GPU, {self.cpus_per_node} CPUs, {self.memory_mb} MiB per node, pretended"
        head = f"sandbox {self.name}: {self.state}; {shape}; proctrack/{self.proctrack}"
        return "\n".join([head, *aligned(rows), f"logs: {self.logs}", f"export SLURM_CONF={self.slurm_conf}"])
