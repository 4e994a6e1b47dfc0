"""`dsv4kit image`: what is in the image of a hardware and why, and its Dockerfile."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from dsv4kit.cli import image_build

if TYPE_CHECKING:
    from dsv4kit.image.stack import Stack


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "Images: what is inside and why, and how they are built."
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=text, description=text)
        added.add_argument("hardware", metavar="HW", help="hardware, see `dsv4kit profiles`")
        added.add_argument("--stack", metavar="STACK", help="another stack than the hardware's usual")
        return added

    show = action("show", "what is in the image of a hardware, and why")
    show.add_argument("--json", action="store_true", help="for programs")
    render = action("render", "the Dockerfile; with --out DIR all that is needed to build it by hand")
    render.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="BASE_IMAGE, VERL_SHA, ...")
    render.add_argument("--out", metavar="DIR", help="write Dockerfile, locks and the kit there")
    for name, text in image_build.ACTIONS.items():
        image_build.add_arguments(name, actions.add_parser(name, help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Carries out the action."""
    if args.action in image_build.ACTIONS:
        return image_build.run(args)
    return _show(args) if args.action == "show" else _render(args)


def _render(args: argparse.Namespace) -> int:
    from pathlib import Path

    from dsv4kit.config.values import split_pair
    from dsv4kit.errors import UserError

    if args.out is None:
        if args.set:
            raise UserError(f"image render: {args.set[0]!r}: goes with --out DIR")
        from dsv4kit.image.render import render

        print(render(args.hardware, args.stack), end="")
        return 0
    from dsv4kit.image.context import write_context

    variables = dict(split_pair(text, "image render") for text in args.set)
    if args.stack is not None:
        variables["STACK"] = args.stack
    context = write_context(args.hardware, Path(args.out), variables)
    print(f"{context.directory}: {context.stack} for {context.architecture}, {context.stack_hash[:12]}; for instance")
    given = [word for name, value in context.build_args.items() if value for word in ("--build-arg", f"{name}={value}")]
    print(f"  {shlex.join(['docker', 'build', *given, '--tag', context.tag, str(context.directory)])}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from dsv4kit.config.loading import hardware_of
    from dsv4kit.image.render import architecture_of
    from dsv4kit.image.stack import stack_for
    from dsv4kit.text_table import aligned

    hardware = hardware_of(args.hardware)
    stack = stack_for(args.hardware, args.stack)
    architecture = architecture_of(hardware)
    rows = _rows(stack)
    locked = _locked(stack, architecture)
    if args.json:
        import json

        shown: dict[str, Any] = {
            "hardware": hardware.name,
            "architecture": architecture,
            **stack.model_dump(),
            "locked": locked,
        }
        print(json.dumps(shown, indent=2))
        return 0
    print(f"{hardware.name} ({architecture}), stack {stack.name}: {stack.description}")
    print("\n".join(aligned(rows)))
    print(f"and their dependencies, {len(locked)} packages by version and hash; --json has them all")
    return 0


def _rows(stack: Stack) -> list[tuple[str, str, str, str]]:
    """(from where, what, which, why)."""
    rows = [("base", stack.base.image, stack.base.digest or "digest to be given", stack.base.reason)]
    rows += [("system", name, "", why) for name, why in stack.system.items()]
    rows += [(f"locks/{name}", "", "", "made by hand; reasons are in the file") for name in stack.locks]
    for name, package in stack.index.items():
        how = {"install": "index", "compile": "compiled", "dependencies": "index"}[package.role]
        note = " (its dependencies only)" if package.role == "dependencies" else ""
        rows.append((how, name, package.version + note, package.reason))
    for name, source in stack.git.items():
        which = source.sha or f"{source.variable} has to say"
        rows.append(("compiled" if source.role == "compile" else "git", name, which, source.reason))
    rows += [("override", requirement, "", why) for requirement, why in (stack.overrides | stack.caps).items()]
    rows += [("left out", name, "", why) for name, why in stack.never.items()]
    return rows


def _locked(stack: Stack, architecture: str) -> dict[str, str]:
    """Version of every package in the locks."""
    from dsv4kit.image import locks

    if stack.locks:
        texts = [(locks.DIRECTORY / name).read_text(encoding="utf-8") for name in stack.locks]
    else:
        texts = [locks.read(stack, architecture)]
    entries = (pair for text in texts for pair in locks.entries(text))
    return {name: entry.splitlines()[0].partition("==")[2].rstrip(" \\") for name, entry in entries}
