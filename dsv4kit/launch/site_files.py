"""The files a site names, as this machine sees them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dsv4kit.config.site import Site

_SQUASHFS = b"hsqs"


def problems(site: Site) -> Iterator[str]:
    """What is wrong with them, a line each."""
    if site.container.image:
        yield from image_problems(site.container.image)
    if site.secrets_file:
        yield from secrets_problems(site.secrets_file)


def image_problems(image: str) -> Iterator[str]:
    """The image has to be a squashfs that can be read here."""
    try:
        with Path(image).open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        yield f"container.image: {image!r}: {error.strerror}"
        return
    if magic != _SQUASHFS:
        yield f"container.image: {image!r}: no squashfs (it begins with {magic!r})"


def secrets_problems(path: str) -> Iterator[str]:
    """The file with keys has to belong to this user, and to be for nobody else. Its content is not looked at."""
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
    elif mode != 0o600:
        yield f"secrets_file: {path!r}: its mode is {mode:04o}, not 0600; `chmod 600` it"
