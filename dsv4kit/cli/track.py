"""`dsv4kit track`: a run's curve for TensorBoard, wandb or MLflow, written afterwards and without a network."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.errors import UserError, nearest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = (
        "Write a run's curve in a tracker's own format: all segments as one, a step that was trained again with its"
        " later values. Nothing is sent; `wandb sync` sends what is written for wandb."
    )
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    add_variables(parser, BY_VERB["track"])


def run(args: argparse.Namespace) -> int:
    """Writes it, and says where."""
    from dsv4kit.cli.runs import chosen_name
    from dsv4kit.launch.run_dir import find_run
    from dsv4kit.report import tracked

    if args.to not in tracked.TRACKERS:
        allowed = ", ".join(tracked.TRACKERS)
        said = "not set" if args.to is None else f"no tracker of that name{nearest(args.to, tracked.TRACKERS)}"
        raise UserError(f"TO={args.to or ''}: {said}; allowed: {allowed}")
    run_dir = find_run(chosen_name(args))
    directory = Path(args.out).absolute() if args.out is not None else run_dir.tracking / f"written-{args.to}"
    count = tracked.write(run_dir, args.to, directory)
    print(f"{count} steps: {directory}")
    return 0
