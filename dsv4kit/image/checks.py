"""What a Dockerfile of the kit may not have: engine-specific traps, sources that can change, missing files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath

from dsv4kit.errors import nearest
from dsv4kit.image.dockerfile import Instruction, Stage, declared, parse
from dsv4kit.image.stack import NOT_ON_THE_INDEX, canonical

# pip takes `-no-build-isolation` for a bundle of short options; so only these, spelt out.
PIP_OPTIONS = (
    "--index-url",
    "--no-build-isolation",
    "--no-deps",
    "--no-index",
    "--require-hashes",
    "--requirement",
    "--wheel-dir",
)
_PIP_TAKES_VALUE = ("--index-url", "--requirement", "--wheel-dir")
# Every engine and shell has these.
_ALWAYS = {"PATH", "HOME"}
_SHA = re.compile(r"[0-9a-f]{40}")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)(:?[-+])?|([A-Za-z_][A-Za-z0-9_]*))")
_SET_BY_SHELL = re.compile(r"(?:^|[\s;(])(?:for\s+([A-Za-z_]\w*)\s+in\b|([A-Za-z_]\w*)=)")
_SEPARATORS = re.compile(r"&&|\|\||[;|\n]|\bthen\b|\bdo\b|\{ ")


def problems(text: str, context: Collection[str] | None = None) -> list[str]:
    """One line per problem, with its line number. `context`: the files there are to copy, as relative paths."""
    file = parse(text)
    found: list[tuple[int, str]] = []
    known: set[str] = set()
    for stage in file.stages:
        found += _base(stage, file.arguments, known)
        for instruction in stage.instructions[1:]:
            found += _traps(instruction)
            found += _undefined(instruction, stage, file.arguments)
            new = declared(instruction)
            if instruction.word == "ARG":
                stage.arguments |= new
            stage.environment |= new if instruction.word == "ENV" else set()
            if instruction.word == "RUN":
                found += _pip(instruction)
                found += _git(instruction)
            if instruction.word in ("COPY", "ADD"):
                found += _copy(instruction, known, context)
        known.add(stage.name)
        _hand_on(stage, file.stages)
    return [f"line {line}: {problem}" for line, problem in sorted(found)]


def _hand_on(stage: Stage, stages: list[Stage]) -> None:
    """Stages built from this one have its environment, and none of its ARGs."""
    for later in stages:
        if later.base == stage.name:
            later.environment |= stage.environment


def _base(stage: Stage, arguments: set[str], known: set[str]) -> Iterator[tuple[int, str]]:
    line = stage.instructions[0].line
    variable = re.fullmatch(r"\$\{([A-Za-z_]\w*)\}", stage.base)
    if variable and variable[1] not in arguments:
        yield line, f"FROM: {stage.base} has no ARG before the first FROM"
    elif not variable and stage.base not in {"scratch", *known} and not re.search(r"@sha256:[0-9a-f]{64}$", stage.base):
        yield line, f"FROM {stage.base}: neither a stage above nor an image with a digest"


def _traps(instruction: Instruction) -> Iterator[tuple[int, str]]:
    """What some engine does not know, or does wrong (buildah 1.28)."""
    line = instruction.line
    if instruction.word == "SHELL":
        yield line, "SHELL: ignored where images are written in the OCI format"
    if instruction.word in ("RUN", "COPY") and re.search(r"<<-?\s*[\"']?\w", instruction.text):
        yield line, "heredoc: unknown to buildah 1.28"
    if "type=tmpfs" in instruction.flags.get("mount", ""):
        yield line, "tmpfs mount: buildah 1.28 empties the image over it"
    if instruction.word == "RUN" and not instruction.text.startswith("set -eu;"):
        yield line, "RUN: does not begin with `set -eu;`, so a failing command goes unnoticed"


def _undefined(instruction: Instruction, stage: Stage, global_arguments: set[str]) -> Iterator[tuple[int, str]]:
    text = instruction.text
    there = _ALWAYS | stage.arguments | stage.environment
    if instruction.word == "RUN":
        text = re.sub(r"'[^']*'", "''", text)
        there |= {name for pair in _SET_BY_SHELL.findall(text) for name in pair if name}
    for braced, default, bare in _VARIABLE.findall(text):
        name = braced or bare
        if name in there or (default and name in ("LD_LIBRARY_PATH", "CPATH", "PYTHONPATH")):
            continue
        hint = "; ARG it again in this stage" if name in global_arguments else nearest(name, there)
        yield instruction.line, f"${{{name}}}: not defined in stage {stage.name}{hint}"


def _commands(instruction: Instruction) -> Iterator[list[str]]:
    """The simple commands of a RUN, as words."""
    for part in _SEPARATORS.split(instruction.text.replace("\\\n", " ")):
        try:
            words = shlex.split(part)
        except ValueError:
            words = part.split()
        while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def _pip(instruction: Instruction) -> Iterator[tuple[int, str]]:
    line = instruction.line
    for words in _commands(instruction):
        at = next((index for index, word in enumerate(words) if PurePosixPath(word).name in ("pip", "pip3")), None)
        if at is None or words[at + 1 : at + 2] not in (["install"], ["wheel"]):
            continue
        rest = words[at + 2 :]
        skip = False
        for word in rest:
            if skip:
                skip = False
            elif word.startswith("-"):
                if word not in PIP_OPTIONS:
                    yield line, f"pip: {word!r} is not an option used here{nearest(word, PIP_OPTIONS)}"
                skip = word in _PIP_TAKES_VALUE
            elif canonical(word) in NOT_ON_THE_INDEX:
                yield line, f"pip: {word} is something else on the package index; take it from git, at a sha"
            elif not word.startswith(("/", "${")):
                yield line, f"pip: {word} is taken from the index by name; packages come from the locks"
        if "--no-deps" not in rest:
            yield line, "pip: without --no-deps it brings what no lock has"


def _git(instruction: Instruction) -> Iterator[tuple[int, str]]:
    line, commands = instruction.line, list(_commands(instruction))
    if "git+" in instruction.text and not re.search(r"git\+https://\S+@[0-9a-f]{40}\b", instruction.text):
        yield line, "git+: not at a full commit sha"
    for words in commands:
        if words[0] != "git":
            continue
        if any(word in ("-b", "--branch") or word.startswith("--branch=") for word in words):
            yield line, f"git: {' '.join(words)}: a branch moves; take a full commit sha"
        elif "fetch" in words and not _SHA.fullmatch(words[-1]):
            yield line, f"git fetch: {words[-1]!r} is not a full commit sha"
        elif "clone" in words and not any(_detached(other, words[-1]) for other in commands):
            yield line, f"git clone into {words[-1]}: no full commit sha is checked out there"


def _detached(words: list[str], directory: str) -> bool:
    """`git -C DIRECTORY checkout --detach SHA`, the sha written out or in a variable that is one."""
    exact = bool(_SHA.fullmatch(words[-1]) or re.fullmatch(r"\$\{[A-Z0-9_]+_SHA\}", words[-1]))
    return words[0] == "git" and "checkout" in words and "--detach" in words and directory in words and exact


def _copy(instruction: Instruction, stages: set[str], context: Collection[str] | None) -> Iterator[tuple[int, str]]:
    line, source = instruction.line, instruction.flags.get("from")
    if instruction.word == "ADD":
        yield line, "ADD: it also unpacks and downloads; use COPY, which only copies"
    if source is not None:
        if source not in stages:
            yield line, f"COPY --from={source}: no such stage above{nearest(source, stages)}"
        return
    for name in instruction.text.split()[:-1]:
        wanted = name.rstrip("/")
        if context is not None and not any(file == wanted or file.startswith(f"{wanted}/") for file in context):
            yield line, f"COPY {name}: not in the build's context{nearest(wanted, context)}"
