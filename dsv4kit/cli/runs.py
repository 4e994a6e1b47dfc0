"""What the verbs about an existing run share: the run and the Slurm it was submitted to."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from dsv4kit.errors import UserError

if TYPE_CHECKING:
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.run.directory import RunDir


def chosen_name(args: argparse.Namespace) -> str | None:
    """The run's name as an argument or as --run; None if neither was given."""
    if args.name is not None and args.run is not None and args.name != args.run:
        raise UserError(f"RUN={args.run!r}: another run, {args.name!r}, is named too")
    name: str | None = args.run if args.name is None else args.name
    return name


def open_run(name: str | None) -> tuple[RunDir, Slurm]:
    """The run of that name (the newest if None), and its cluster's client commands."""
    from dsv4kit.launch.run_dir import find_run, read_record
    from dsv4kit.launch.slurm import Slurm

    run = find_run(name)
    return run, sandbox_slurm() if read_record(run)["site"].get("name") == "sandbox" else Slurm()


def sandbox_slurm() -> Slurm:
    """The sandbox's client commands; while it is down they say so."""
    from dsv4kit import hints
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.sandbox.cluster import Sandbox

    running = Sandbox.load()
    # Only root sees whether the daemons run.
    if running is None or (os.geteuid() == 0 and not running.alive):
        return Slurm(down=f"the sandbox is down; `{hints.command('sandbox up')}` starts it")
    return Slurm(running.client_env)
