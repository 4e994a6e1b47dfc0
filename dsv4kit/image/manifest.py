"""What is in an image, proved at the end of its build and written down: `python -m dsv4kit.image.manifest DIRECTORY`.

Runs inside the image, on a build host that need not have a GPU. Reads `image.json` and `shas/` in the directory, writes
`manifest.json`; anything that does not hold is one line on stderr, exit status 1, and no manifest.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4kit.image import inventory
from dsv4kit.run.files import write_json

# Raised when a reader of older manifests would go wrong.
FORMAT = 1
_IMPORT_LIMIT_S = 900
# How Python, CUDA and their libraries say that there is no driver; anything else is a defect of the image.
_NO_DRIVER = (
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "found no nvidia driver",
    "no cuda gpus are available",
    "no cuda-capable device",
    "cuda driver version is insufficient",
    "stub library",
    "cuda error: system has unsupported",
)

# argv: module, attribute or nothing. torch first, as in whatever trains: it loads CUDA's libraries from their packages,
# and Transformer Engine's own way of finding them fails beside a toolkit without cuBLAS.
_TORCH = """
import importlib, importlib.util, pathlib, sys
if importlib.util.find_spec("torch"): import torch
"""
_IMPORT = f"""{_TORCH}
m = importlib.import_module(sys.argv[1])
sys.argv[2] and getattr(m, sys.argv[2])
"""
_EVERY_MODULE = f"""{_TORCH}
package = importlib.import_module(sys.argv[1])
for place in map(pathlib.Path, package.__path__):
    for file in sorted(place.rglob("*.py")):
        parts = file.relative_to(place).with_suffix("").parts
        importlib.import_module(".".join([sys.argv[1], *(part for part in parts if part != "__init__")]))
"""


@dataclass(frozen=True)
class Imported:
    """How an import went: `works`, `works with a stub of the driver`, `needs a driver` (none is here), or `fails`."""

    how: str
    said: str = ""


def try_import(name: str, may_need_driver: bool, stub: Path | None = None) -> Imported:
    """Imports `module`, `module:attribute` or every module of `package.*` in a process of its own.

    `stub`: a stand-in for the driver's library.
    """
    return _outcome(lambda environment: _import(name, environment), may_need_driver, stub)


def _outcome(attempt: Callable[[Mapping[str, str]], str | None], may_need_driver: bool, stub: Path | None) -> Imported:
    tried = attempt({})
    if tried is None:
        return Imported("works")
    if not may_need_driver or Path("/dev/nvidiactl").exists() or not _is_about_driver(tried):
        return Imported("fails", tried)
    if stub is not None:
        with as_driver(stub) as directory:
            path = ":".join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), str(directory)]))
            again = attempt({"LD_LIBRARY_PATH": path})
        if again is None:
            return Imported("works with a stub of the driver")
        if not _is_about_driver(again):
            return Imported("fails", again)
    return Imported("needs a driver", tried)


def _import(name: str, environment: Mapping[str, str]) -> str | None:
    """None where it works, else the last line that was said."""
    module, _, attribute = name.partition(":")
    package = module.removesuffix(".*")
    code = _EVERY_MODULE if package != module else _IMPORT
    return _tried([code, package, attribute], environment)


def _tried(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """None where the code works, else the last line that was said."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_LIMIT_S,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        return f"not imported after {_IMPORT_LIMIT_S} s"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:400] if lines else f"ended with {done.returncode}"


def _is_about_driver(said: str) -> bool:
    lowered = said.lower()
    return any(sign in lowered for sign in _NO_DRIVER)


@contextlib.contextmanager
def as_driver(stub: Path | None) -> Iterator[Path | None]:
    """A directory where the stub goes by the driver's name; None without one."""
    if stub is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "libcuda.so.1").symlink_to(stub)
        yield Path(directory)


def driver_stub() -> Path | None:
    """The CUDA toolkit's stub of the driver's library."""
    root = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return next(iter(sorted(root.glob("targets/*/lib/stubs/libcuda.so"))), None)


def packages() -> dict[str, str]:
    """Version of every Python package that can be imported, by canonical name."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-").replace(".", "-"), distribution.version)
    return dict(sorted(found.items()))


def complaints() -> list[str]:
    """What `pip check` says: requirements that the stack overrides on purpose, and whatever else does not fit."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    return sorted(line for line in done.stdout.splitlines() if line and not line.startswith("No broken"))


def sha_problems(facts: Mapping[str, Any], shas: Mapping[str, str]) -> list[str]:
    """Where the sources that were built differ from those that were asked for."""
    wanted: Mapping[str, str] = facts["git"]
    return [
        f"{name}: built from {shas.get(name)}, asked for {sha}" for name, sha in wanted.items() if shas.get(name) != sha
    ]


def _imports(facts: Mapping[str, Any], names: Iterable[str], stub: Path | None) -> dict[str, Imported]:
    """How each import goes."""
    return {name: try_import(name, facts["imports"][name], stub) for name in names}


def _asked(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What every run of this recipe asks of the packages: replicas of DeepSeek-V4 have several data-parallel ranks."""
    return {"data_parallel": 2} if facts["recipe"] == "grpo" and facts["device"] == "cuda" else {}


def examine_early(directory: Path) -> list[str]:
    """What does not hold of what can be known before anything is compiled: a minute in place of an hour."""
    from dsv4kit.image import probes
    from dsv4kit.plugin import needs

    facts = json.loads((directory / "image.json").read_text(encoding="utf-8"))
    problems = []
    for model in probes.models(facts["hardware"], facts["recipe"]):
        lacking = needs.report(model, facts["recipe"], asked=_asked(facts))["missing"]
        problems += [f"{model}, {facts['recipe']}: {line}" for line in lacking]
    imports = _imports(facts, facts["early"], driver_stub())
    problems += [f"import {name}: {tried.said}" for name, tried in imports.items() if tried.how == "fails"]
    problems += probes.feature_problems(facts["verl"])
    return problems + probes.profile_problems(facts["hardware"], facts["recipe"], facts["verl"], facts["device"])[1]


def examine(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """(the manifest, what does not hold)."""
    from dsv4kit.image import patches, probes
    from dsv4kit.plugin import needs

    facts = json.loads((directory / "image.json").read_text(encoding="utf-8"))
    problems = []
    if platform.machine() != facts["architecture"]:
        problems.append(f"built on {platform.machine()}, the hardware is {facts['architecture']}")
    shas = {file.name: file.read_text().strip() for file in sorted(directory.glob("shas/*"))}
    problems += sha_problems(facts, shas)
    stub = driver_stub()
    imports = _imports(facts, facts["imports"], stub)
    problems += [f"import {name}: {tried.said}" for name, tried in imports.items() if tried.how == "fails"]
    problems += probes.feature_problems(facts["verl"])
    profiles, wrong = probes.profile_problems(facts["hardware"], facts["recipe"], facts["verl"], facts["device"])
    problems += wrong
    models = probes.models(facts["hardware"], facts["recipe"])
    needed = [needs.report(model, facts["recipe"], asked=_asked(facts)) for model in models]
    for report in needed:
        problems += [f"{report['model']}, {report['recipe']}: {line}" for line in report["missing"]]
    with as_driver(None if Path("/dev/nvidiactl").exists() else stub) as driver:
        rows = patches.outcomes(driver)
    problems += patches.problems(rows)
    manifest = {
        "format": FORMAT,
        **{name: facts[name] for name in ("hardware", "architecture", "stack", "stack_hash", "base_image")},
        "python": platform.python_version(),
        "git": shas,
        "features": {"verl": facts["verl"], **probes.features(facts["verl"]), "contains": facts["contains"]},
        "profiles": profiles,
        "needs": [{key: report[key] for key in ("model", "recipe", "ok", "missing")} for report in needed],
        "facts": needs.report("", "")["facts"],
        "imports": {name: tried.how for name, tried in imports.items()},
        "patches": rows,
        "complaints": complaints(),
        "packages": packages(),
    }
    return manifest, problems


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Nothing of the checks stays in the image."""
    before = os.environ.get("DSV4KIT_CACHE")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["DSV4KIT_CACHE"] = directory
        try:
            yield
        finally:
            os.environ.pop("DSV4KIT_CACHE")
            os.environ |= {} if before is None else {"DSV4KIT_CACHE": before}


def main(arguments: list[str]) -> int:
    """Examines and writes; 1 where something does not hold. With `--early` first: only what can be known by then."""
    directory = Path(arguments[-1])
    if arguments[0] == "--early":
        with _own_cache():
            problems = examine_early(directory)
        for problem in problems:
            print(f"dsv4kit: {problem}", file=sys.stderr)
        return 1 if problems else 0
    with _own_cache():
        manifest, problems = examine(directory)
    for problem in problems:
        print(f"dsv4kit: {problem}", file=sys.stderr)
    for name, how in manifest["imports"].items():
        print(f"dsv4kit: import {name}: {how}")
    if problems:
        return 1
    write_json(directory / inventory.NAME, inventory.take())
    write_json(directory / "manifest.json", manifest)
    print(f"dsv4kit: {len(manifest['packages'])} packages, {len(manifest['profiles'])} profiles fit")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
