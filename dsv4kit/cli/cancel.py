"""`dsv4kit cancel`: ends a run: its running segment and those that wait. What is saved stays."""

from __future__ import annotations

import argparse
import json

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "Cancel all segments of a run."
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    add_variables(parser, BY_VERB["cancel"])


def run(args: argparse.Namespace) -> int:
    """Cancels, and says how much there was and what of it is still there."""
    from dsv4kit.cli.runs import chosen_name, open_run
    from dsv4kit.launch.cancel import cancel_run

    run_dir, slurm = open_run(chosen_name(args))
    count, left = cancel_run(run_dir, slurm)
    if args.json:
        print(json.dumps({"run": run_dir.name, "cancelled_segments": count, "still_there": left}))
        return 1 if left else 0
    if left:
        jobs = ", ".join(f"job {job_id} ({state})" for job_id, state in left.items())
        print(f"run {run_dir.name}: Slurm was told to cancel {_segments(count)}; still there: {jobs}")
        return 1
    print(f"run {run_dir.name}: {f'cancelled {_segments(count)}' if count else 'there is nothing left to cancel'}")
    return 0


def _segments(count: int) -> str:
    return f"{count} segment{'s' if count > 1 else ''}"
