"""Reading a Dockerfile: its instructions and stages. No heredocs: the kit writes none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=?")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=((?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|\\.|[^\s\\])*)")


@dataclass(frozen=True)
class Instruction:
    """One instruction, its lines joined; `flags` are its `--name=value` before the rest."""

    line: int
    word: str
    flags: dict[str, str]
    text: str


@dataclass
class Stage:
    """What follows one FROM, that first."""

    name: str
    base: str
    instructions: list[Instruction]
    arguments: set[str] = field(default_factory=set)
    environment: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Dockerfile:
    """The whole file: ARGs before the first FROM, then stages."""

    arguments: set[str]
    stages: list[Stage]


def instructions(text: str) -> Iterator[Instruction]:
    """Every instruction in order; comments are skipped, also within a continued line."""
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not joined and not line.strip()):
            continue
        start = start if joined else number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + "\n"
            continue
        yield _instruction(start, joined + line)
        joined = ""
    if joined:
        yield _instruction(start, joined)


def _instruction(line: int, text: str) -> Instruction:
    word, _, rest = text.strip().partition(" ")
    flags: dict[str, str] = {}
    rest = rest.lstrip()
    while match := re.match(r"--([a-z-]+)(?:=(\S*))?\s+", rest):
        flags[match[1]] = match[2] or ""
        rest = rest[match.end() :]
    return Instruction(line, word.upper(), flags, rest)


def parse(text: str) -> Dockerfile:
    """Stage by stage; their variables are filled in by who goes through the instructions."""
    before: set[str] = set()
    stages: list[Stage] = []
    for found in instructions(text):
        if found.word == "FROM":
            base, _, name = re.sub(r"\s+(as|AS)\s+", " AS ", found.text).partition(" AS ")
            stages.append(Stage(name.strip(), base.strip(), [found]))
        elif not stages:
            if found.word == "ARG":
                before |= set(_NAME.findall(found.text)[:1])
        else:
            stages[-1].instructions.append(found)
    return Dockerfile(before, stages)


def declared(instruction: Instruction) -> set[str]:
    """The variables an ARG or ENV declares."""
    if instruction.word == "ARG":
        return set(_NAME.findall(instruction.text)[:1])
    return {name for name, _ in _ASSIGNMENT.findall(instruction.text)} if instruction.word == "ENV" else set()
