"""Which CPU a squashfs image was built for, read from a program inside it."""

from __future__ import annotations

import subprocess

from dsv4kit.config.schema import Hardware

# Real files, not links, in Debian's, Ubuntu's and Red Hat's layouts.
_PROGRAMS = ("usr/bin/bash", "bin/bash")
_MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}
_PATIENCE_S = 20


def problem(image: str, hardware: Hardware) -> str | None:
    """Why the image cannot run on this hardware; None where it can, or where nothing here can look into it."""
    found, wanted = architecture(image), hardware.cpu_architecture
    if found is None or wanted is None or found == wanted:
        return None
    return f"image {image!r}: built for {found}, and {hardware.name} is {wanted}; an image built for {wanted} is needed"


def architecture(image: str) -> str | None:
    """`x86_64` or `aarch64` as `uname -m` says it; None without squashfs-tools 4.5 or a program to look at."""
    for program in _PROGRAMS:
        try:
            done = subprocess.run(
                ["unsquashfs", "-cat", image, program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_PATIENCE_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        header = done.stdout[:20]
        if header[:4] == b"\x7fELF" and len(header) == 20:
            return _MACHINES.get(int.from_bytes(header[18:20], "big" if header[5] == 2 else "little"))
    return None
