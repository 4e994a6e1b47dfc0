"""`dsv4kit profiles`: the profiles there are, and one of them resolved, with the source of every value."""

from __future__ import annotations

import argparse

from dsv4kit.errors import UserError, nearest


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the verb."""
    parser = subparsers.add_parser("profiles", help="list profiles, or show one", description="List or show profiles.")
    parser.add_argument("action", nargs="?", choices=["list", "show"], default="list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the profile to show")


def run(args: argparse.Namespace) -> int:
    """Prints the list, or one resolved profile."""
    from dsv4kit.config.loading import HERE, load_settings, load_yaml, names
    from dsv4kit.config.tree import leaves

    if args.action == "list":
        for name in names("profiles"):
            profile = load_yaml(HERE / "profiles" / f"{name}.yaml")
            combination = " ".join(f"{key}={value}" for key, value in profile["for"].items())
            print(f"{name:20}  {combination:48}  {profile['description']}")
        return 0
    known = names("profiles")
    if args.name not in known:
        raise UserError(
            f"profile {args.name!r}: no such name; known: {', '.join(known)}{nearest(str(args.name), known)}"
        )
    combination = load_yaml(HERE / "profiles" / f"{args.name}.yaml")["for"]
    resolved = load_settings(combination["hardware"], combination["model"], combination["recipe"])
    values = leaves(resolved.settings.model_dump())
    rows = [(f"{key} = {value!r}", resolved.sources.get(key, "default")) for key, value in values]
    width = max(len(text) for text, _ in rows)
    for text, source in rows:
        print(f"{text:{min(width, 90)}}  # {source}")
    return 0
