"""`dsv4kit schema`: the JSON Schema of one kind of settings file, for editors."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = (
        "Print the JSON Schema of a settings file. `dsv4kit schema site > site.schema.json` beside the file, named in"
        " its first line (`# yaml-language-server: $schema=site.schema.json`), lets editors complete and check it."
    )
    parser.add_argument("kind", metavar="KIND", help="site, hardware, profile, model or recipe")


def run(args: argparse.Namespace) -> int:
    """Prints it."""
    import json

    from dsv4kit.config import json_schema
    from dsv4kit.errors import UserError, nearest

    if args.kind not in json_schema.KINDS:
        known = ", ".join(json_schema.KINDS)
        raise UserError(
            f"schema {args.kind!r}: no such kind of file; known: {known}{nearest(args.kind, known.split(', '))}"
        )
    print(json.dumps(json_schema.of(args.kind), indent=2))
    return 0
