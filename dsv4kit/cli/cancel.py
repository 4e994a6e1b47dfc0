"""`dsv4kit cancel`: ends a run: its running segment and those that wait. What is saved stays."""

from __future__ import annotations

import argparse

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the verb."""
    parser = subparsers.add_parser("cancel", help="end a run", description="Cancel all segments of a run.")
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    add_variables(parser, BY_VERB["cancel"])


def run(args: argparse.Namespace) -> int:
    """Cancels, the last segment first, so that none starts because the one before it ended."""
    from dsv4kit.cli.runs import open_run
    from dsv4kit.launch.state import read_state

    run_dir, slurm = open_run(args.name or args.run)
    live = [segment.job_id for segment in read_state(run_dir, slurm).segments if not segment.over]
    slurm.cancel(list(reversed(live)))
    print(f"run {run_dir.name}: cancelled {len(live)} segments" if live else f"run {run_dir.name}: nothing to cancel")
    return 0
