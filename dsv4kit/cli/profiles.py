"""`dsv4kit profiles`: the profiles there are, and one of them resolved, with the source of every value."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from dsv4kit.errors import UserError, nearest

if TYPE_CHECKING:
    from dsv4kit.config.loading import Resolved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "List or show profiles."
    parser.add_argument("action", nargs="?", choices=["list", "show"], default="list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the profile to show")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Prints the list, or one resolved profile."""
    import json

    from dsv4kit.config.loading import combinations

    known = combinations()
    if args.action == "list":
        if args.name is not None:
            raise UserError(f"profiles list: takes no name; `dsv4kit profiles show {shlex.quote(args.name)}` shows one")
        rows = [_row(name, combination) for name, combination in known.items()]
        if args.json:
            print(json.dumps(rows, indent=2))
        else:
            _print_list(rows)
        return 0
    if args.name not in known:
        raise UserError(
            f"profile {args.name!r}: no such name; known: {', '.join(known)}{nearest(str(args.name), known)}"
        )
    resolved = _resolved(known[args.name])
    if args.json:
        shown = {
            "profile": args.name,
            "select": known[args.name],
            "settings": resolved.settings.model_dump(),
            "sources": dict(resolved.sources),
            "derived": _derived(resolved),
        }
        print(json.dumps(shown, indent=2))
    else:
        _print_settings(resolved)
    return 0


def _resolved(combination: dict[str, str]) -> Resolved:
    from dsv4kit.config.loading import load_settings

    return load_settings(combination["hardware"], combination["model"], combination["recipe"])


def _row(name: str, combination: dict[str, str]) -> dict[str, Any]:
    settings = _resolved(combination).settings
    return {
        "profile": name,
        **combination,
        "nodes": settings.schedule.nodes,
        "gpus": settings.schedule.nodes * settings.hardware.gpus_per_node,
        "description": settings.description,
    }


def _derived(resolved: Resolved) -> dict[str, Any]:
    """What follows from the settings and is not one of them."""
    from dsv4kit.feasibility.node_memory import needed_gib
    from dsv4kit.feasibility.run_layout import pipeline_layout
    from dsv4kit.feasibility.trainer_rules import node_unit
    from dsv4kit.plan.of_settings import plan_of

    settings = resolved.settings
    return {
        "pipeline_layout": pipeline_layout(settings),
        "nodes_multiple_of": node_unit(settings),
        "min_memory_gib": needed_gib(settings, plan_of(settings, "")),
    }


def _print_list(rows: list[dict[str, Any]]) -> None:
    from dsv4kit.text_table import aligned

    lines = [
        (
            row["profile"],
            f"HW={row['hardware']} MODEL={row['model']} RECIPE={row['recipe']}",
            f"{row['nodes']} nodes",
            row["description"],
        )
        for row in rows
    ]
    print("\n".join(aligned(lines, right=(2,))))


def _print_settings(resolved: Resolved) -> None:
    from dsv4kit.config.tree import leaves
    from dsv4kit.text_table import aligned

    values = leaves(resolved.settings.model_dump())
    rows = [(f"{key} = {value!r}", resolved.sources.get(key, "default")) for key, value in values]
    rows += [(f"# {key} = {value!r}", "follows from the above") for key, value in _derived(resolved).items()]
    print("\n".join(aligned([(text, f"# {source}") for text, source in rows], most=90)))
