"""`dsv4kit explain`: what the trainer's processes of a running segment are doing now, on all nodes."""

from __future__ import annotations

import argparse

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "Show what the processes of a run's running segment are doing, on all nodes. Disturbs nothing."
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    add_variables(parser, BY_VERB["explain"])


def run(args: argparse.Namespace) -> int:
    """Asks, and shows where the processes are: the same place on many nodes is one line."""
    from dsv4kit.cli.runs import chosen_name, open_run
    from dsv4kit.launch.explain import ask_running
    from dsv4kit.run import stacks

    run_dir, slurm = open_run(chosen_name(args))
    found, nodes = ask_running(run_dir, slurm)
    if not found:
        raise UserError(f"{run_dir.name}: no node answered within {stacks.ALL_ANSWERS_S:.0f} s")
    answered = len({stack.host for stack in found})
    print(f"{run_dir.name}: {len(found)} processes on {answered} of {nodes} nodes")
    print("\n".join(stacks.described(found)))
    for node in stacks.odd_nodes(found):
        print(f"{node} is where it differs")
    return 0
