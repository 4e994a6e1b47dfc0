"""What the verbs about an existing run share: the run and the Slurm it was submitted to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4kit.launch.run_dir import RunDir
    from dsv4kit.launch.slurm import Slurm


def open_run(name: str | None) -> tuple[RunDir, Slurm]:
    """The run of that name (the newest if None), and its cluster's client commands."""
    from dsv4kit.launch.run_dir import find_run
    from dsv4kit.launch.slurm import Slurm

    run = find_run(name)
    if run.frozen()["site"]["name"] != "sandbox":
        return run, Slurm()
    from dsv4kit.sandbox.cluster import Sandbox

    running = Sandbox.load("default")
    return run, Slurm(running.client_env if running else None)
