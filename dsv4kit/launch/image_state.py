"""The image a run was submitted with, as its file was then; a segment starts in no other."""

from __future__ import annotations

import os
from typing import NamedTuple

from dsv4kit.config.site import Site
from dsv4kit.errors import UserError


class ImageState(NamedTuple):
    """A squashfs; `sha256` is the record's beside it (`image build`, `image import`), where there is one.

    Size and time are what a segment compares: reading tens of GB for a checksum would take minutes each time.
    """

    path: str
    size_bytes: int
    mtime_s: int
    sha256: str | None = None


def now(site: Site) -> ImageState | None:
    """The site's image as it is; None without one, or where it cannot be seen from here."""
    from pathlib import Path

    from dsv4kit.image import record

    path = site.container.image
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    known = record.load(Path(path))
    return ImageState(path, status.st_size, int(status.st_mtime), known.sha256 if known else None)


def of_record(content: object) -> ImageState | None:
    """As `run.yaml` has it; None in a run of an older kit."""
    if not isinstance(content, dict):
        return None
    return ImageState(**{key: value for key, value in content.items() if key in ImageState._fields})


def kept(frozen: object, site: Site, named: bool) -> ImageState | None:
    """The state for the next segments of a run; `named`: the user has just said which image (IMAGE=, SITE=).

    Raises UserError for the same path with another file behind it.
    """
    before, after = of_record(frozen), now(site)
    if before and after and not named and before.path == after.path and before[1:3] != after[1:3]:
        raise UserError(
            f"image {after.path}: not the file any more that the run began with ({before.size_bytes} bytes then,"
            f" {after.size_bytes} now, or written anew); IMAGE={after.path} takes it as it is now"
        )
    return after or before
