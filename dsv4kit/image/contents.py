"""What is in a squashfs image, read without root and without unpacking it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from dsv4kit.errors import UserError

# Where the image's build writes what it found inside.
MANIFEST = "opt/dsv4kit/manifest.json"

# Real files, not links, in Debian's, Ubuntu's and Red Hat's layouts.
_PROGRAMS = ("usr/bin/bash", "bin/bash", "usr/bin/busybox", "bin/busybox")
_MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}
_PATIENCE_S = 20
# All names of an image: 2 s for 87,000 of them.
_LISTING_S = 120
_ROOT = "image"
# Parts of the manifest whose structure is checked when they are present.
_SHAPES = {
    "features": dict,
    "packages": dict,
    "git": dict,
    "imports": dict,
    "profiles": list,
    "patches": list,
    "needs": list,
    "facts": dict,
    "hardware": str,
}


class UnreadableError(UserError):
    """Nothing on this machine can look into the image."""


def read(image: str, path: str) -> bytes | None:
    """A file of the image by its path without the leading `/`; None where there is none.

    Raises UnreadableError without squashfs-tools 4.5, UserError for an image that is damaged.
    """
    try:
        done = subprocess.run(
            ["unsquashfs", "-cat", image, path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_S,
        )
    except FileNotFoundError:
        raise UnreadableError(f"{image}: not looked into: there is no unsquashfs here (squashfs-tools)") from None
    except subprocess.TimeoutExpired:
        raise UnreadableError(f"{image}: unsquashfs gave no answer in {_PATIENCE_S} s") from None
    if b"invalid option" in done.stderr:
        raise UnreadableError(f"{image}: not looked into: unsquashfs here has no -cat (squashfs-tools 4.5 has)")
    said = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if "FATAL" in line]
    if done.returncode != 0 and said:
        if "support" in said[0]:  # a compression that the unsquashfs here was built without
            raise UnreadableError(f"{image}: not looked into: {said[0]}")
        raise UserError(f"{image}: damaged, copy it again: {said[0]}")
    return done.stdout if done.returncode == 0 else None


def listed(image: str, *paths: str) -> dict[str, str]:
    """Path -> what it is a link to (`` for none), of those of `paths` that are in the image, without the leading `/`.

    Raises UnreadableError where nothing here can look into it.
    """
    found = {}
    for line in _listing(image, *paths):
        name, _, target = line.partition(f"{_ROOT}/")[2].partition(" -> ")
        if name in paths:
            found[name] = target
    return found


def unpacked_bytes(image: str) -> int | None:
    """Bytes of all files of the image; None where nothing here can look into it."""
    try:
        lines = _listing(image)
    except UserError:
        return None
    sizes = [line.split(None, 3)[2] for line in lines if line.startswith("-")]
    return sum(int(size) for size in sizes if size.isdecimal())


def _listing(image: str, *paths: str) -> list[str]:
    try:
        argv = ["unsquashfs", "-d", _ROOT, "-lln", image, *paths]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_LISTING_S
        )
    except FileNotFoundError:
        raise UnreadableError(f"{image}: not looked into: there is no unsquashfs here (squashfs-tools)") from None
    except subprocess.TimeoutExpired:
        raise UnreadableError(f"{image}: unsquashfs gave no answer in {_LISTING_S} s") from None
    return done.stdout.splitlines()


def architecture(image: str) -> str | None:
    """`x86_64` or `aarch64` as `uname -m` says it; None where no program in it tells. Raises UnreadableError."""
    for program in _PROGRAMS:
        header = (read(image, program) or b"")[:20]
        if header[:4] == b"\x7fELF" and len(header) == 20:
            return _MACHINES.get(int.from_bytes(header[18:20], "big" if header[5] == 2 else "little"))
    return None


def manifest(image: str) -> dict[str, Any] | None:
    """`/opt/dsv4kit/manifest.json`; None in an image that was made without the kit. Raises UserError when damaged."""
    content = read(image, MANIFEST)
    if content is None:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not is_manifest(found):
        raise UserError(f"{image}: /{MANIFEST} in it is damaged")
    made: dict[str, Any] = found
    return made


def is_manifest(found: object) -> bool:
    """Whether what was read has the shape of a manifest, of this format or another."""
    return isinstance(found, dict) and all(isinstance(found.get(name, kind()), kind) for name, kind in _SHAPES.items())
