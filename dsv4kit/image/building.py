"""`image build`: context, engine, squashfs; an image that is there already and good is used again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4kit import locking
from dsv4kit.config.cache import cache_dir
from dsv4kit.config.loading import hardware_of
from dsv4kit.config.schema import Hardware
from dsv4kit.errors import UserError
from dsv4kit.image import base, host_settings, importing, record, space, wheels
from dsv4kit.image.context import BuildContext, without_cache_mounts, write_stack
from dsv4kit.image.engine import Build, Engine, remove_tree
from dsv4kit.image.engines import choose
from dsv4kit.image.progress import Progress
from dsv4kit.image.record import Record
from dsv4kit.image.render import architecture_of
from dsv4kit.image.stack import Stack, stack_for

_BINFMT = Path("/proc/sys/fs/binfmt_misc")


@dataclass(frozen=True)
class BuildRequest:
    """What is to be built: `variables` as `write_context` knows them, `out` the squashfs, `engine` one by name."""

    hardware: str
    variables: Mapping[str, str] = field(default_factory=dict)
    out: Path | None = None
    engine: str | None = None


@dataclass(frozen=True)
class Built:
    """The squashfs and its record; `reused`: it was there already."""

    path: Path
    record: Record
    reused: bool


def directory() -> Path:
    """Where images are built and kept on this machine, unless they are given another place."""
    return cache_dir() / "images"


def make(request: BuildRequest, progress: Progress) -> Built:
    """Builds the image and writes its squashfs. Every failure is a UserError, with nothing half-written left."""
    machine = hardware_of(request.hardware)
    architecture = architecture_of(machine)
    variables = dict(request.variables)
    if variables.get("BASE_IMAGE", "").startswith("/"):
        raise UserError(
            f"BASE_IMAGE={variables['BASE_IMAGE']!r}: a squashfs is a base for building by a job alone (SITE=...)"
        )
    stack = stack_for(request.hardware, variables.get("STACK") or None)
    if not variables.get("BASE_IMAGE") and stack.base.digest is None and base.suite_of(stack.base.image):
        variables["BASE_IMAGE"] = base.local_name(stack.base.image, architecture)
    local_base = base.image_of(variables.get("BASE_IMAGE", ""))
    with context_of(stack, machine, variables) as context:
        out = (request.out or default_path(context)).absolute()
        if found := reusable(out, context):
            return Built(out, found, reused=True)
        if os.path.lexists(out):
            known = record.load(out)
            what = f"stack {known.stack_hash[:12]}" if known and known.stack_hash else "something else"
            raise UserError(
                f"IMAGE={str(out)!r}: exists already and has {what} inside, not {context.stack_hash[:12]}; remove it,"
                " or name another file"
            )
        check_processor(architecture)
        importing.check_writable(out)
        with one_at_a_time(progress):
            engine = choose(request.engine, directory() / "build")
            _clear(engine, progress, [Path(context.directory)])
            _require_space(engine, context, machine.device, out)
            log = directory() / "build.log"
            log.unlink(missing_ok=True)
            progress(f"{engine.program} builds {context.tag}; all output goes to {log}")
            if local_base:
                base.provide(engine, local_base, architecture, log, progress)
            mounts = host_settings.mounts(engine.directory / "host", os.environ)
            arguments = {name: value for name, value in context.build_args.items() if value}
            arguments["BASE_IMAGE"] = base.qualified(context.base_image)
            if not engine.knows_cache_mounts():
                without_cache_mounts(context)
            build = Build(context.directory, context.dockerfile, context.tag, architecture, arguments, mounts)
            _keep_wheels(engine, build, context, log, progress)
            engine.build(build, log, progress)
            made = importing.to_file(
                engine,
                context.tag,
                out,
                architecture,
                log,
                progress,
                stack_hash=context.stack_hash,
                hardware=context.hardware,
            )
    return Built(out, made, reused=False)


def _keep_wheels(engine: Engine, build: Build, context: BuildContext, log: Path, progress: Progress) -> None:
    """Builds as far as what is compiled, and keeps that: whatever fails afterwards, it is not compiled again."""
    if not context.to_compile:
        return
    tag = f"{context.tag}-wheels"
    engine.build(dataclasses.replace(build, tag=tag, target="wheels"), log, progress)
    with engine.files(tag) as root:
        for name, key in context.to_compile.items():
            if place := wheels.keep(key, sorted((root / "wheels" / name).glob("*.whl"))):
                progress(f"kept: {place}")


def clean(progress: Progress, engine_name: str | None = None) -> list[str]:
    """Removes what builds that were killed have left: containers with their mounts, half contexts and file systems."""
    with one_at_a_time(progress):
        return _clear(choose(engine_name, directory() / "build"), progress, [])


def _clear(engine: Engine, progress: Progress, mine: Sequence[Path]) -> list[str]:
    removed = [f"container {name}" for name in engine.prepare()]
    for pattern in ("context-*", "build/base-*", "build/rootfs-*", "build/enroot-*"):
        for path in sorted(set(directory().glob(pattern)) - set(mine)):
            base.unmount_below(path)
            remove_tree(path)
            removed.append(f"directory {path}")
    for what in removed:
        progress(f"left by a build that was killed, removed: {what}")
    return removed


def default_path(context: BuildContext) -> Path:
    """A name that no other content has."""
    name = f"dsv4kit-{context.hardware}-{context.stack}-{context.architecture}-{context.stack_hash[:12]}.sqsh"
    return directory() / name


def check_processor(architecture: str) -> None:
    """Refuses to build for a processor this machine neither has nor emulates."""
    if architecture == os.uname().machine:
        return
    with contextlib.suppress(OSError):
        if "enabled" in (_BINFMT / f"qemu-{architecture}").read_text():
            return
    raise UserError(
        f"this machine is {os.uname().machine}, the image is for {architecture}, and there is no emulation"
        f" (binfmt_misc has no qemu-{architecture}): build it on a machine with such a processor"
    )


@contextlib.contextmanager
def one_at_a_time(progress: Progress) -> Iterator[None]:
    """The lock of all builds and imports on this machine."""
    directory().mkdir(parents=True, exist_ok=True)
    with locking.held(directory() / "lock", lambda: progress("another build is running; waiting for it")):
        yield


@contextlib.contextmanager
def context_of(stack: Stack, machine: Hardware, variables: Mapping[str, str]) -> Iterator[BuildContext]:
    """The build's context, for as long as it is needed."""
    directory().mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="context-", dir=directory()))
    try:
        yield write_stack(stack, machine, made, variables)
    finally:
        remove_tree(made)


def reusable(out: Path, context: BuildContext) -> Record | None:
    """The record of an image that is there already and has exactly this inside."""
    found = record.load(out)
    if found and (found.stack_hash, found.architecture) == (context.stack_hash, context.architecture):
        return found
    return None


def _require_space(engine: Engine, context: BuildContext, device: str, out: Path) -> None:
    storage, file = space.needs(device)
    wanted = {out.parent: file}
    if not engine.has(context.tag):
        wanted[engine.storage()] = storage
    space.require(wanted)
