"""The files a site names, as this machine sees them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dsv4kit.config.site import Site

_SQUASHFS = b"hsqs"
# Of its first block: the length, and where in it the length of the whole file system is (little endian).
_SUPERBLOCK = 96
_USED = slice(40, 48)


def problems(site: Site) -> Iterator[str]:
    """What is wrong with them, a line each."""
    if site.container.image:
        yield from image_problems(site.container.image)
    if site.secrets_file:
        yield from secrets_problems(site.secrets_file)


def image_problems(image: str, key: str = "container.image") -> Iterator[str]:
    """The image has to be a squashfs that can be read here, and whole; `key` is what named it."""
    try:
        status = os.stat(image)
        if not stat.S_ISREG(status.st_mode):
            yield f"{key}: {image!r}: not a regular file"
            return
        with Path(image).open("rb") as file:
            begin = file.read(_SUPERBLOCK)
    except OSError as error:
        yield f"{key}: {image!r}: {error.strerror}"
        return
    size = max(_SUPERBLOCK, int.from_bytes(begin[_USED], "little"))
    if not begin.startswith(_SQUASHFS):
        yield f"{key}: {image!r}: no squashfs (it begins with {begin[:4]!r})"
    elif status.st_size < size:
        yield f"{key}: {image!r}: cut short: {status.st_size} of {size} bytes; copy it again"


def secrets_problems(path: str) -> Iterator[str]:
    """The secrets file has to belong to this user and be readable by nobody else. Its content is not read."""
    try:
        status = os.lstat(path)
    except OSError as error:
        yield f"secrets_file: {path!r}: {error.strerror}"
        return
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        yield f"secrets_file: {path!r}: not a regular file"
    elif status.st_uid != os.getuid():
        yield f"secrets_file: {path!r}: belongs to somebody else"
    elif mode not in (0o600, 0o400):
        yield f"secrets_file: {path!r}: its mode is {mode:04o}, not 0600 or 0400; `chmod 600` it"
