"""Checkouts of Megatron-LM and Megatron-Bridge at a stack's commits: how to get them, and whether a given one is that.

DeepSeek-V4 is in no release of either; what trains or tests it without an image takes it from two directories that the
user names (MEGATRON_LM, MEGATRON_BRIDGE). Nothing is fetched here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dsv4kit.errors import UserError, nearest
from dsv4kit.image.stack import GitSource, Stack, stacks


class Checkout(NamedTuple):
    """One checkout: the variable that names it, its package under `git` of a stack, and a file that V4 is in."""

    variable: str
    package: str
    file: Path


CHECKOUTS = (
    Checkout(
        "MEGATRON_LM",
        "megatron-core",
        Path("megatron/core/transformer/experimental_attention_variant/deepseek_v4_hybrid_attention.py"),
    ),
    Checkout("MEGATRON_BRIDGE", "megatron-bridge", Path("src/megatron/bridge/models/deepseek/deepseek_v4_bridge.py")),
)


def stack_of(name: str) -> Stack:
    """The stack of that name, which has to have both packages from git."""
    having = {key: s for key, s in stacks().items() if all(wanted.package in s.git for wanted in CHECKOUTS)}
    if name not in having:
        raise UserError(
            f"STACK={name!r}: no stack with a Megatron of its own; allowed: {', '.join(having)}{nearest(name, having)}"
        )
    return having[name]


def commands(stack: Stack) -> list[str]:
    """Shell commands that make both checkouts below the current directory: one commit each, whatever branch has it."""
    lines = []
    for wanted in CHECKOUTS:
        source = stack.git[wanted.package]
        folder = source.url.rpartition("/")[2]
        lines += [
            f"git init -q {folder}",
            f"git -C {folder} fetch -q --depth 1 {source.url} {source.sha}",
            f"git -C {folder} -c advice.detachedHead=false checkout -q FETCH_HEAD",
        ]
    return lines


def directory(wanted: Checkout, given: str) -> Path:
    """The checkout that `given` names, absolute. Refuses one without DeepSeek-V4 in it."""
    path = Path(given).expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"{wanted.variable}={given}: no such directory")
    if not (path / wanted.file).is_file():
        raise UserError(f"{wanted.variable}={given}: no {wanted.file} in there, so no DeepSeek-V4")
    return path


def difference(wanted: Checkout, given: str, source: GitSource) -> str:
    """How the checkout differs from the stack's commit, in a few words; empty where it is just that."""
    path = directory(wanted, given)
    head = _git(path, "rev-parse", "HEAD")
    if head is None or _git(path, "rev-parse", "--show-prefix"):
        return f"is no git checkout, so nothing says that it is {source.sha}"
    if head != source.sha:
        return f"is at {head}, the stack has {source.sha}"
    changed = (
        _git(path, "status", "--porcelain", "--untracked-files=normal", "--", str(wanted.file.parts[0])) or ""
    ).splitlines()
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"is at {head[:12]} but changed: {changed[0].split(maxsplit=1)[-1]}{more}"
    return ""


def check(stack: Stack, given: Mapping[str, str]) -> list[str]:
    """A line per checkout that is right; the first that is not is a UserError."""
    lines = []
    for wanted in CHECKOUTS:
        if value := given.get(wanted.variable):
            source = stack.git[wanted.package]
            if found := difference(wanted, value, source):
                raise UserError(f"{wanted.variable}={value}: {found}")
            lines.append(f"{wanted.variable}={value}: {source.sha}, unchanged")
    return lines


def _git(path: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(path), *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
