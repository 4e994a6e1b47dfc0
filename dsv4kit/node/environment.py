"""The environment of everything the agent starts: set before Ray, because a Ray worker inherits its raylet's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dsv4kit.node.ray.cluster import FOREIGN_GPU_VARIABLES
from dsv4kit.node.stacks import DIRECTORY
from dsv4kit.run.directory import AttemptDir
from dsv4kit.run.node_spec import NodeSpec

# What enroot's hook for images of PyTorch, a foreign image or a shell may set, and torch, Ray and Python read: who is
# which rank is verl's affair here, and which Ray cluster is the kit's.
FOREIGN_VARIABLES = frozenset(
    {
        *FOREIGN_GPU_VARIABLES,
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS", "RAY_NAMESPACE", "RAY_RUNTIME_ENV_HOOK", "RAY_TMPDIR"),
        *("PYTHONHOME", "PYTHONSTARTUP", "PYTHONOPTIMIZE"),
    }
)


def build(
    base: Mapping[str, str],
    spec: NodeSpec,
    attempt: AttemptDir,
    temporary: Path,
    caches: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """`base` (the agent's own environment) with the run's variables, and without what would mislead the trainer.

    `temporary` is the attempt's node-local directory: home to caches where a container leaves no home to write to.
    `caches`: where compiled kernels go; what the site, the profile or the user says of it comes first.
    """
    env = {key: value for key, value in base.items() if key not in FOREIGN_VARIABLES}
    env |= {
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # a directory called `ray` where a process happens to start must not shadow the package
        "PYTHONNOUSERSITE": "1",  # nor must what somebody once installed into their home
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "HYDRA_FULL_ERROR": "1",
        "DSV4KIT_ATTEMPT_DIR": str(attempt.path),  # for the plugin
        "DSV4KIT_STACKS_DIR": str(temporary / DIRECTORY),  # where processes write what they are doing
        # verl opens this file anew at each start, hence one per attempt.
        "VERL_FILE_LOGGER_PATH": str(attempt.metrics_file),
    }
    if not os.access(env.get("HOME", ""), os.W_OK):
        env["HOME"] = str(temporary / "home")
    if spec.interface:
        env |= {"GLOO_SOCKET_IFNAME": spec.interface, "NCCL_SOCKET_IFNAME": spec.interface}
    return env | dict(caches or {}) | spec.env
