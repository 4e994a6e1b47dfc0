"""`dsv4kit cancel`: ends a run: its running segment and those that wait. What is saved stays."""

from __future__ import annotations

import argparse

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "Cancel all segments of a run."
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    add_variables(parser, BY_VERB["cancel"])


def run(args: argparse.Namespace) -> int:
    """Cancels by the name that only this run's jobs have: also a job that no file knows of."""
    from dsv4kit.cli.runs import chosen_name, open_run
    from dsv4kit.launch.state import ENDED

    run_dir, slurm = open_run(chosen_name(args))
    live = [state for state in slurm.states_named(run_dir.job_name) if state not in ENDED]
    slurm.cancel_named(run_dir.job_name)
    print(f"run {run_dir.name}: cancelled {len(live)} segments" if live else f"run {run_dir.name}: nothing to cancel")
    return 0
