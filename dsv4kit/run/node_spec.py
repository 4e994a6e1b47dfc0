"""What a segment's nodes are told: `node.json` in the run directory, written by `submit`, read by every agent.

Standard library only; frozen into every run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv4kit.run.directory import RunDir
from dsv4kit.run.errors import DamagedFileError
from dsv4kit.run.files import read_json, write_json


@dataclass(frozen=True)
class NodeResources:
    """What every node brings: into the Ray cluster, or (its GPUs, one process each) under torchrun."""

    cpus: int
    gpus: int
    object_store_bytes: int
    ready_deadline_s: float


@dataclass(frozen=True)
class KernelCaches:
    """Where compiled kernels go (`node.kernel_cache`): each variable with a directory's name.

    `key`: what they were compiled for; kernels of another key are never used. `limit_bytes`: of all that is kept.
    `filled`: variable -> a place in the home of the image, which may have come with kernels: then it is left alone.
    """

    key: str
    variables: dict[str, str]
    limit_bytes: int
    filled: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """What a node must have before it starts, and when a segment is given up.

    `restarts`: how often a job starts its trainer again after a fault. `save_s`: what a save is
    planned to take; 0 where nothing is known.
    """

    min_memory_bytes: int
    min_shm_bytes: int
    stall_s: float
    max_attempts_without_progress: int
    restarts: int = 0
    save_s: float = 0.0


@dataclass(frozen=True)
class NodeSpec:
    """Everything the agents need; paths are absolute and valid on every node, inside the container if there is one.

    `rollout_seed` is what every start adds its step to; None where each sample has a seed of its own, and for SFT.
    `data_ranks` is how many `data_<rank>.pt` a checkpoint of SFT has; None for GRPO. `keep_last`, `keep_every` and
    `keep_best` say which checkpoints stay (`checkpoint.retention`); where the first is None, as in runs of older kits,
    all do. `kernels` is None where each segment compiles its own. `needs` is what the packages inside have to have
    (`model`, `recipe`, `fields`, `asked`: see plugin/needs.py); empty: nothing is looked for. `gates`: what the metrics
    must not become (run/gates.py); empty: anything.
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
    ray: NodeResources
    limits: Limits
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    needs: dict[str, Any] = field(default_factory=dict)
    kernels: KernelCaches | None = None
    gates: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, run: RunDir) -> NodeSpec:
        """The spec of a run, as an agent reads it."""
        content = json.loads(run.node_spec_file.read_text(encoding="utf-8"))
        content["ray"] = NodeResources(**content["ray"])
        content["limits"] = Limits(**content["limits"])
        if content.get("kernels"):
            content["kernels"] = KernelCaches(**content["kernels"])
        return cls(**content)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self)


def read_as_dict(run: RunDir) -> dict[str, Any]:
    """`node.json` of a run that any version of the kit may have begun. Raises DamagedFileError."""
    content = read_json(run.node_spec_file)
    if not isinstance(content, dict) or not {"checkpoint_dir", "total_steps"} <= content.keys():
        raise DamagedFileError.of(run.node_spec_file, "what the run's nodes are told")
    return content


def write(run: RunDir, content: Mapping[str, object]) -> None:
    """Writes `node.json`: `NodeSpec.as_dict`, or what `read_as_dict` gave with values changed.

    A run's frozen agents take the keys they know and no others, so none may be added to a run that has begun.
    """
    write_json(run.node_spec_file, content)
