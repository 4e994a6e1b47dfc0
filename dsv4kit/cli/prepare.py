"""`dsv4kit prepare`: data and weights before a run."""

from __future__ import annotations

import argparse

from dsv4kit.cli import prepare_data, prepare_model

ACTIONS = {"data": prepare_data, "model": prepare_model}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "What a run needs before it is submitted: data in verl's columns, and a model that is whole."
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, module in ACTIONS.items():
        module.add_arguments(actions.add_parser(name, help=module.HELP, description=module.HELP))


def run(args: argparse.Namespace) -> int:
    """Carries out the action."""
    status: int = ACTIONS[args.action].run(args)
    return status
