"""Wheels of what is compiled in an image, kept below the kit's cache and used again: compiling them takes an hour.

A wheel is used where everything that decides what the compiler makes is the same: source, torch, compiler, Python,
processor, GPU, base image.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4kit.config.cache import cache_dir
from dsv4kit.config.schema import Hardware
from dsv4kit.image import locks
from dsv4kit.image.stack import Stack, canonical
from dsv4kit.run.files import write_json

Key = Mapping[str, Any]
# Under which the compiled packages of the index go: all of them are compiled in one step.
PACKAGES = "packages"
_KEY = "key.json"


def directory() -> Path:
    """Where they are kept on this machine."""
    return cache_dir() / "images" / "wheels"


def keys(stack: Stack, hardware: Hardware, architecture: str, base_image: str) -> dict[str, Key]:
    """Of everything the stack compiles, what decides how it comes out."""
    if stack.locks:
        return {}
    text = locks.read(stack, architecture)
    entries = dict(locks.entries(text))
    same = {
        "torch": _version(entries.get("torch", "")) or base_image,
        "nvcc": _version(entries.get("nvidia-cuda-nvcc", "")) or base_image,
        "python": stack.python,
        "architecture": architecture,
        "gpu": hardware.sm_architecture,
        "base_image": base_image,
    }
    found: dict[str, Key] = {}
    for name, source in stack.git.items():
        if source.role == "compile":
            submodules = {path: inner.sha for path, inner in source.submodules.items()}
            found[name] = {"name": name, "source": source.sha, "submodules": submodules, **same}
    compiled = {canonical(name) for name, package in stack.index.items() if package.role == "compile"}
    if compiled:
        what = hashlib.sha256("".join(entries[name] for name in sorted(compiled)).encode()).hexdigest()
        versions = {name: _version(entries[name]) for name in sorted(compiled)}
        found[PACKAGES] = {"name": PACKAGES, "source": what, "versions": versions, **same}
    return found


def ready(key: Key) -> list[Path]:
    """The wheels kept under this key, whole; none where there are none, or where one of them is damaged."""
    place = _place(key)
    try:
        kept = json.loads((place / _KEY).read_text(encoding="utf-8"))
        files = {place / name: digest for name, digest in kept["wheels"].items()}
        whole = bool(files) and kept["key"] == dict(key)
        return sorted(files) if whole and all(_sha256(file) == digest for file, digest in files.items()) else []
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return []


def keep(key: Key, files: Sequence[Path]) -> Path | None:
    """Keeps wheels under this key; the key's file is the last, so that half of them are never used."""
    if not files:
        return None
    place = _place(key)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file in files:
        shutil.copy2(file, place)
    write_json(place / _KEY, {"key": dict(key), "wheels": {file.name: _sha256(place / file.name) for file in files}})
    return place


def _place(key: Key) -> Path:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return directory() / f"{key['name']}-{str(key['source'])[:12]}-{key['architecture']}-sm{key['gpu']}-{digest[:12]}"


def _version(entry: str) -> str:
    return entry.partition("\n")[0].partition("==")[2].rstrip(" \\")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
