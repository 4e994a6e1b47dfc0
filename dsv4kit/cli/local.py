"""What a run on the sandbox needs besides a profile: a cluster, an environment to train in, and the toy model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.launch.submission import Submission


def on_sandbox(submission: Submission, torch_index: str | None, install: bool) -> Submission:
    """`submission` with the sandbox's Slurm, Python, model and data.

    `install` puts in place whatever is missing; without it (a dry run) the paths are those an installation would have.
    """
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.sandbox import packages, runtime
    from dsv4kit.sandbox.cluster import Sandbox, SandboxSpec

    if not install:
        python, assets = runtime.expected_python(), runtime.expected_assets()
        return _with(submission, Slurm(), python, assets)
    packages.require_packages()
    python = runtime.runtime_python(torch_index=torch_index)
    assets = runtime.assets_dir(python)
    submission.run.path.parent.mkdir(parents=True, exist_ok=True)
    spec = SandboxSpec()
    running = Sandbox.load(spec.name)
    shared = [submission.run.path.parent, python.parents[1], assets]
    if running is None:
        print(f"sandbox: starting Slurm with {spec.nodes} nodes on this machine", flush=True)
        running = Sandbox.up(spec, share=shared)
    else:
        running.share(shared)
    return _with(submission, Slurm(running.client_env), python, assets)


def _with(submission: Submission, slurm: Slurm, python: Path, assets: Path) -> Submission:
    return dataclasses.replace(
        submission, slurm=slurm, python=str(python), model_path=str(assets / "model"), data_dir=str(assets)
    )
