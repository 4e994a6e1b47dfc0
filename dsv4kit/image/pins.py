"""containers/pins.yaml: the base image's digest and the commits that containers/stack.yaml cannot say, per stack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dsv4kit.config.loading import load_yaml
from dsv4kit.config.paths import ROOT
from dsv4kit.errors import UserError
from dsv4kit.run.files import write_text

FILE = ROOT / "containers" / "pins.yaml"
BASE = "base"
_SHOWN = str(FILE.relative_to(ROOT))
_FORMS = {BASE: r"sha256:[0-9a-f]{64}"}
_COMMIT = r"[0-9a-f]{40}"


def recorded() -> dict[str, dict[str, str | None]]:
    """By stack: the digest under `base`, and each variable's commit; null for what is not known.

    Raises UserError for what is neither, with its place.
    """
    found: dict[str, dict[str, str | None]] = {}
    for stack, entries in (load_yaml(FILE) if FILE.exists() else {}).items():
        if not isinstance(entries, dict):
            raise UserError(f"{_SHOWN}: {stack}: expected keys and values")
        for name, value in entries.items():
            if value is not None and not (isinstance(value, str) and re.fullmatch(_FORMS.get(name, _COMMIT), value)):
                wanted = "sha256: and 64 digits" if name == BASE else "a full commit sha, 40 digits"
                raise UserError(f"{_SHOWN}: {stack}.{name}={value!r}: {wanted} of 0-9 and a-f, or null")
        found[str(stack)] = dict(entries)
    return found


def record(stack: str, values: Mapping[str, str]) -> None:
    """Writes values of one stack down; the file's comments and everything else in it stay."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    for name, value in values.items():
        lines = _with(lines, stack, name, value)
    write_text(FILE, "\n".join([*lines, ""]))


def _with(lines: list[str], stack: str, name: str, value: str) -> list[str]:
    line = f"  {name}: {value}"
    if f"{stack}:" not in lines:
        return [*lines, f"{stack}:", line]
    at = lines.index(f"{stack}:") + 1
    while at < len(lines) and (lines[at].startswith(" ") or not lines[at].strip()):
        if lines[at].startswith(f"  {name}:"):
            return [*lines[:at], line, *lines[at + 1 :]]
        at += 1
    return [*lines[:at], line, *lines[at:]]


def fill(name: str, tree: dict[str, Any], known: Mapping[str, str | None]) -> dict[str, Any]:
    """A stack's tree from stack.yaml with what is recorded for it. Raises UserError for a pin of nothing in it."""
    base, git = tree.get("base"), tree.get("git", {})
    if not known or not isinstance(base, dict) or not isinstance(git, dict):
        return tree
    tree = {**tree, "base": dict(base), "git": dict(git)}
    variables = {source.get("variable"): key for key, source in git.items() if isinstance(source, dict)}
    for variable, value in known.items():
        if variable == BASE:
            tree["base"]["digest"] = value
        elif variable in variables:
            key = variables[variable]
            tree["git"][key] = {**tree["git"][key], "recorded": value}
        else:
            raise UserError(f"{_SHOWN}: {name}.{variable}: no variable of that stack")
    return tree
