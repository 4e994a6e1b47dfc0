"""The directory an engine builds an image from: the Dockerfile, and everything it copies."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsv4kit import hints, libraries
from dsv4kit.config.loading import hardware_of
from dsv4kit.config.paths import ROOT
from dsv4kit.config.schema import Hardware
from dsv4kit.errors import UserError, nearest
from dsv4kit.image import checks, given, locks, wheels
from dsv4kit.image.render import architecture_of, render_stack, requirements_of
from dsv4kit.image.stack import Fetched, Stack, stack_for

# Of the kit: all that checks and trains; of its libraries: what the agents are started with.
_KIT = ("dsv4kit", "containers/chat-templates")
# Whatever builds on this machine alone needs no digest: it is the user's own.
_LOCAL = "localhost/"
# 1 January 1980, the earliest a zip can hold.
_TIME_S = 315532800
_OPTIONAL = ("MAX_JOBS", "NVCC_THREADS", "TORCH_INDEX")


@dataclass(frozen=True)
class BuildContext:
    """What an engine is given. `stack_hash`: of everything that decides what is inside, the kit's own copy aside."""

    directory: Path
    hardware: str
    stack: str
    architecture: str
    stack_hash: str
    tag: str
    base_image: str
    build_args: Mapping[str, str]
    to_compile: Mapping[str, wheels.Key] = field(default_factory=dict)
    """What no wheel is kept of yet, by its directory below /wheels."""

    @property
    def dockerfile(self) -> Path:
        """Rendered for this hardware."""
        return self.directory / "Dockerfile"


def write_context(hardware: str, directory: Path, variables: Mapping[str, str]) -> BuildContext:
    """Writes the context into `directory`, which is made, and must be empty where it exists.

    `variables`: BASE_IMAGE and the commits the stack asks for (`Stack.variables`), where containers/pins.yaml does not
    know them; NAME_SOURCE=PLACE of a repository (`Stack.repositories`); STACK, MAX_JOBS, NVCC_THREADS, TORCH_INDEX
    where they are wanted. Raises UserError for what is missing or not exact, before anything is written.
    """
    return write_stack(stack_for(hardware, variables.get("STACK") or None), hardware_of(hardware), directory, variables)


def write_stack(stack: Stack, machine: Hardware, directory: Path, variables: Mapping[str, str]) -> BuildContext:
    """`write_context` for a stack that is known already, and need not stand in containers/stack.yaml."""
    said = {name: value for name, value in variables.items() if value and name != "STACK"}
    hardware = machine.name
    build_args = _build_args(stack, machine, said)
    compiled = wheels.keys(stack, machine, architecture_of(machine), build_args["BASE_IMAGE"])
    ready = {name: wheels.ready(key) for name, key in compiled.items()}
    files = {
        "Dockerfile": render_stack(machine, stack),
        **_requirements(stack, machine),
        **{f"wheels/{name}/key.json": json.dumps(dict(key), indent=2) + "\n" for name, key in compiled.items()},
        **{f"sources/{each.name}/sha": f"{_sha(each, stack, build_args)}\n" for each in stack.repositories.values()},
    }
    for problem in checks.problems(files["Dockerfile"], [*files, "image.json", *(f"kit/{name}" for name in _KIT)]):
        raise UserError(f"templates/Dockerfile.j2, as rendered for {hardware}: {problem}")
    facts = _facts(stack, machine, build_args)
    # Where sources come from, and what is compiled already, changes nothing of what is inside.
    decisive = {name: text for name, text in files.items() if not name.startswith(("sources/", "wheels/"))}
    stack_hash = _hash({**decisive, "image.json": json.dumps(facts, sort_keys=True)})
    files["image.json"] = json.dumps({**facts, "stack_hash": stack_hash}, indent=2) + "\n"
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory}: not empty; a build context is written into a directory of its own")
    was_there = directory.exists()
    try:
        for name, content in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(content, encoding="utf-8")
        for variable, place in said.items():
            if variable in stack.repositories and variable not in build_args:
                each = stack.repositories[variable]
                contains = stack.git[each.of].contains if not each.path else ()
                into = directory / "sources" / each.name / "tree"
                given.put(each, _sha(each, stack, build_args), place, into, contains)
        for name, kept in ready.items():
            for file in kept:
                shutil.copy2(file, directory / "wheels" / name)
        _copy_kit(directory / "kit")
        _same_whenever_it_is_written(directory)
    except BaseException as error:
        _remove(directory, itself=not was_there)
        if isinstance(error, OSError):
            raise UserError(f"{directory}: {_why(error)}") from None
        raise
    return BuildContext(
        directory=directory,
        hardware=hardware,
        stack=stack.name,
        architecture=architecture_of(machine),
        stack_hash=stack_hash,
        tag=f"{_LOCAL}dsv4kit-{hardware}:{stack.name}-{stack_hash[:12]}",
        base_image=build_args["BASE_IMAGE"],
        build_args={**build_args, "STACK_HASH": stack_hash, "KIT_REVISION": kit_revision()},
        to_compile={name: key for name, key in compiled.items() if not ready[name]},
    )


def without_cache_mounts(context: BuildContext) -> None:
    """Takes `RUN --mount=type=cache` out of the Dockerfile, for an engine that is too old to know it."""
    text = render_stack(hardware_of(context.hardware), stack_for(context.hardware, context.stack), cache_mounts=False)
    context.dockerfile.write_text(text, encoding="utf-8")


def _sha(each: Fetched, stack: Stack, build_args: Mapping[str, str]) -> str:
    return each.sha or build_args[str(stack.git[each.of].variable)]


def _remove(directory: Path, itself: bool) -> None:
    """What was written."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if itself and directory.is_dir():
        directory.rmdir()


def _why(error: OSError) -> str:
    """Of `copytree`, which gathers (source, destination, reason), the first reason."""
    if isinstance(error, shutil.Error) and error.args and error.args[0]:
        return str(error.args[0][0][2])
    return error.strerror or str(error)


def _build_args(stack: Stack, hardware: Hardware, said: Mapping[str, str]) -> dict[str, str]:
    known = ["BASE_IMAGE", *stack.variables, *stack.repositories, "STACK", *_OPTIONAL]
    for name in said:
        if name not in known:
            raise UserError(
                f"{name}: no build variable of stack {stack.name}; allowed: {', '.join(known)}{nearest(name, known)}"
            )
    found = {"BASE_IMAGE": _base(stack, hardware.name, said.get("BASE_IMAGE"))}
    for name, source in stack.variables.items():
        sha = said.get(name) or source.recorded
        if sha is None:
            after = f" that has {', '.join(source.contains)}" if source.contains else ""
            find = hints.command("image pins", HW=hardware.name)
            raise UserError(
                f"{name}: not set; the full sha of a commit of {source.url}{after}: {source.reason}; `{find}` finds it"
            )
        if not re.fullmatch(r"[0-9a-f]{40}", sha):
            raise UserError(
                f"{name}={sha!r}: not a full commit sha (40 digits of 0-9 and a-f); a branch moves, and no image could"
                f" be built twice: git ls-remote {source.url}"
            )
        found[name] = sha
    for name in ("MAX_JOBS", "NVCC_THREADS"):
        if name in said and not re.fullmatch(r"[1-9][0-9]{0,3}", said[name]):
            raise UserError(f"{name}={said[name]!r}: a number from 1 to 9999")
    if "@" in said.get("TORCH_INDEX", "") or re.search(r"\s", said.get("TORCH_INDEX", "")):
        raise UserError(
            "TORCH_INDEX: an address without a user's name and without spaces; what an engine is told stays in the"
            " image's history, so credentials belong into pip's own configuration (~/.netrc)"
        )
    places = {name: place for name, place in said.items() if name in stack.repositories}
    return found | given.mirrors(places) | {name: said[name] for name in _OPTIONAL if name in said}


def _base(stack: Stack, hardware: str, said: str | None) -> str:
    """The base image by its digest, or one of this machine's own."""
    base = stack.base
    if said is None and base.digest:
        return f"{base.image}@{base.digest}"
    how = f"`{hints.command('image pins', HW=hardware)}` finds the digest"
    if said is None:
        raise UserError(f"BASE_IMAGE: not set; {base.image}@sha256:... is wanted; {how}")
    # A squashfs by its path and sum: what a job on a cluster without a registry builds on.
    if not re.fullmatch(r"(/|[a-z0-9])[A-Za-z0-9._/:-]*(@sha256:[0-9a-f]{64})?", said):
        raise UserError(f"BASE_IMAGE={said!r}: not the name of an image; {base.image}@sha256:... is wanted; {how}")
    if "@" not in said and not said.startswith(_LOCAL):
        raise UserError(f"BASE_IMAGE={said!r}: without a digest it can mean another image tomorrow; {how}")
    return said


def _requirements(stack: Stack, hardware: Hardware) -> dict[str, str]:
    """The files of packages, under their names in the context."""
    if stack.locks:
        texts = [(locks.DIRECTORY / name).read_text(encoding="utf-8") for name in stack.locks]
        return dict(zip(requirements_of(stack), texts, strict=True))
    parts = locks.split(stack, locks.read(stack, architecture_of(hardware)))
    return {name: parts[name.rpartition("/")[2]] for name in requirements_of(stack)}


def _hash(files: Mapping[str, str]) -> str:
    """One for names and contents together."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content.encode())}\n{content}".encode())
    return digest.hexdigest()


def _facts(stack: Stack, hardware: Hardware, build_args: Mapping[str, str]) -> dict[str, object]:
    """What the image is told about itself, for the checks at the end of its build."""
    return {
        "hardware": hardware.name,
        "device": hardware.device,
        "recipe": stack.recipe,
        "architecture": architecture_of(hardware),
        "stack": stack.name,
        "base_image": build_args["BASE_IMAGE"],
        "verl": stack.verl,
        "git": {name: source.sha or build_args[str(source.variable)] for name, source in stack.git.items()},
        "contains": {name: source.contains for name, source in stack.git.items() if source.contains},
        "imports": {name: needed.driver for name, needed in stack.imports.items()},
        "early": [name for name, needed in stack.imports.items() if needed.early],
    }


def _copy_kit(destination: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "test_*")
    for name in _KIT:
        shutil.copytree(ROOT / name, destination / name, ignore=ignore)
    libraries.copy_to(destination, functools.partial(shutil.copytree, ignore=ignore))


def _same_whenever_it_is_written(directory: Path) -> None:
    """Times and modes that depend on content alone: engines look at them too when they ask whether a layer changed."""
    for path in [*directory.rglob("*"), directory]:
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        os.utime(path, (_TIME_S, _TIME_S))


def kit_revision() -> str:
    """The kit's own commit, with `-dirty` where files differ from it; empty outside a git clone."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
