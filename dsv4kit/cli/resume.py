"""`dsv4kit resume`: goes on with a run whose chain is over, from its last complete checkpoint."""

from __future__ import annotations

import argparse
import json
import sys

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "Extend a finished run, or go on with one that stopped."
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    add_variables(parser, BY_VERB["resume"])


def run(args: argparse.Namespace) -> int:
    """Submits the remaining steps as further segments."""
    from dsv4kit.cli.runs import chosen_name, open_run
    from dsv4kit.cli.selection import overrides_of
    from dsv4kit.launch import site_choice
    from dsv4kit.launch.changes import Asked
    from dsv4kit.launch.resume import Resumption
    from dsv4kit.launch.run_dir import read_record

    run_dir, slurm = open_run(chosen_name(args))
    steps = _number("STEPS", args.steps, least=1)
    from_step = _number("FROM_STEP", args.from_step, least=0)
    if args.kit not in (None, "new"):
        raise UserError(f"KIT={args.kit!r}: `new` is the only other kit than the run's own")
    asked = Asked(
        overrides_of(args),
        args.site,
        args.image,
        {name: getattr(args, name.lower()) for name in site_choice.QUEUE},
        new_kit=args.kit == "new",
    )
    links = Resumption(run_dir, slurm, steps, from_step, asked, forget_nodes=bool(args.forget_nodes)).submit(
        lambda line: print(line, flush=True, file=sys.stderr if args.json else sys.stdout)
    )
    if args.json:
        print(json.dumps({"run": run_dir.name, "segments": [vars(link) for link in links]}))
        return 0
    if args.follow if args.follow is not None else read_record(run_dir)["site"]["follow"]:
        from dsv4kit.cli.follow import follow

        return follow(run_dir, slurm, first=links[0].segment)
    return 0


def _number(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise UserError(f"{name}={text!r}: not a whole number from {least} to 999999999")
    return int(text)
