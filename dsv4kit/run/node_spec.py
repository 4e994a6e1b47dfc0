"""What a segment's nodes are told: `node.json` in the run directory, written by `submit`, read by every agent."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RayResources:
    """What every node brings: into the Ray cluster, or (its GPUs, one process each) under torchrun."""

    cpus: int
    gpus: int
    object_store_bytes: int
    ready_deadline_s: float


@dataclass(frozen=True)
class Limits:
    """What a node must have before it starts, and when a segment is given up."""

    min_memory_bytes: int
    min_shm_bytes: int
    stall_s: float
    max_attempts_without_progress: int


@dataclass(frozen=True)
class NodeSpec:
    """Everything the agents need; paths are absolute and valid on every node, inside the container if there is one.

    `rollout_seed` is what every start adds its step to; None where each sample has a seed of its own, and for SFT.
    `data_ranks` is how many `data_<rank>.pt` a checkpoint of SFT has; None for GRPO.
    """

    run: str
    run_dir: str
    nodes: int
    total_steps: int
    segment_steps: int
    checkpoint_dir: str
    quarantine_dir: str
    checkpoint_contents: list[str]
    module: str
    overrides: list[str]
    env: dict[str, str]
    rollout_seed: int | None
    stops_by_plugin: bool
    launcher: str
    data_ranks: int | None
    setup: list[str]
    setup_limit_s: float
    device: str
    cpu_numa_nodes: list[int]
    interface: str | None
    scratch_dir: str
    sample_interval_s: float
    ray: RayResources
    limits: Limits

    @classmethod
    def load(cls, run_dir: Path) -> NodeSpec:
        """The spec of a run."""
        content = json.loads((run_dir / "node.json").read_text(encoding="utf-8"))
        content["ray"] = RayResources(**content["ray"])
        content["limits"] = Limits(**content["limits"])
        return cls(**content)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self)
