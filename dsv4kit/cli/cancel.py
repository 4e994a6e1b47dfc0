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
    """Cancels, and says how much there was."""
    from dsv4kit.cli.runs import chosen_name, open_run
    from dsv4kit.launch.cancel import cancel_run

    run_dir, slurm = open_run(chosen_name(args))
    count = cancel_run(run_dir, slurm)
    done = f"cancelled {count} segment{'s' if count > 1 else ''}" if count else "there is nothing left to cancel"
    print(f"run {run_dir.name}: {done}")
    return 0
