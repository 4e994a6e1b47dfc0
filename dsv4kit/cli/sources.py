"""`dsv4kit sources`: Megatron-LM and Megatron-Bridge at the commits of a stack, how to get them, and are these they."""

from __future__ import annotations

import argparse

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = (
        "How to clone Megatron-LM and Megatron-Bridge at the commits of a stack, and whether given checkouts are those."
    )
    add_variables(parser, BY_VERB["sources"])


def run(args: argparse.Namespace) -> int:
    """Prints the commands, or what was found out about the checkouts."""
    from dsv4kit import hints
    from dsv4kit.image import sources

    stack = sources.stack_of(args.stack or "pro-grpo")
    given = {"MEGATRON_LM": args.megatron_lm, "MEGATRON_BRIDGE": args.megatron_bridge}
    if any(given.values()):
        print("\n".join(sources.check(stack, {name: value for name, value in given.items() if value})))
        return 0
    print(f"# the Megatron of {stack.name} (containers/stack.yaml), 10 MB each")
    print("\n".join(sources.commands(stack)))
    places = {w.variable: stack.git[w.package].url.rpartition("/")[2] for w in sources.CHECKOUTS}
    print(f"# then: {hints.command('sources', **places)}")
    return 0
