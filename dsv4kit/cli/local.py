"""What a run on the sandbox needs besides a profile: a cluster, an environment to train in, and the toy model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4kit.errors import UserError

if TYPE_CHECKING:
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.launch.submission import Submission


def on_sandbox(submission: Submission, torch_index: str | None, install: bool) -> Submission:
    """`submission` with the sandbox's Slurm, Python, model and data.

    `install` puts in place whatever is missing; without it (a dry run) nothing is touched.
    """
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.sandbox import runtime
    from dsv4kit.sandbox.cluster import Sandbox, SandboxSpec
    from dsv4kit.sandbox.host import require_root

    running = Sandbox.load()
    spec = running.spec if running else SandboxSpec()
    nodes = submission.resolved.settings.schedule.nodes
    if nodes > spec.nodes:
        raise UserError(
            f"NODES={nodes}: the sandbox has {spec.nodes} nodes; `dsv4kit sandbox down`, then `up --nodes {nodes}`"
        )
    if not install:
        return _for_show(submission)
    require_root()
    python = runtime.runtime_python(torch_index=torch_index)
    assets = runtime.assets_dir(python)
    submission.run.path.parent.mkdir(parents=True, exist_ok=True)
    if running is None:
        print(f"sandbox: starting Slurm with {spec.nodes} nodes on this machine", flush=True)
    running = Sandbox.up(spec, share=[submission.run.path.parent, python.parents[1], assets])
    return _with(submission, Slurm(running.client_env), python, assets)


def _for_show(submission: Submission) -> Submission:
    """For a dry run: what is there as it is, what is not under a name that says so."""
    from dsv4kit.config.cache import cache_dir
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.sandbox import runtime
    from dsv4kit.sandbox.cluster import Sandbox

    running = Sandbox.load()
    slurm = Slurm(running.client_env if running else None)
    try:
        python = runtime.runtime_python(install=False)
    except UserError:
        missing = cache_dir() / "not-installed-yet"
        return _with(submission, slurm, missing / "bin" / "python", missing)
    return _with(submission, slurm, python, runtime.assets_dir(python))


def _with(submission: Submission, slurm: Slurm, python: Path, assets: Path) -> Submission:
    return dataclasses.replace(
        submission, slurm=slurm, python=str(python), model_path=str(assets / "model"), data_dir=str(assets)
    )
