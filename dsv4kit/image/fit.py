"""What can be known here of an image before it runs: for the rules of `feasibility.image_rules`."""

from __future__ import annotations

import os
from pathlib import Path

from dsv4kit.feasibility.case import ImageFacts
from dsv4kit.image import contents, record
from dsv4kit.image.manifest import FORMAT


def inside(image: str) -> ImageFacts:
    """Processor and manifest of an image, from the file itself or else from the record beside it.

    Raises UnreadableError where nothing here can look into the file, and it has no record.
    """
    try:
        return ImageFacts(image, contents.architecture(image), contents.manifest(image), FORMAT)
    except contents.UnreadableError:
        known = record.load(Path(image))
        if known is None:
            raise
        return ImageFacts(image, known.architecture, known.manifest, FORMAT)


def seen(image: str | None) -> ImageFacts | None:
    """As `inside`; None where there is no image, it is not here, or nothing here can look into it."""
    if image is None or not os.path.exists(image):
        return None
    try:
        return inside(image)
    except contents.UnreadableError:
        return None


def verl_of(facts: ImageFacts | None) -> str | None:
    """Which row of verl_keys/features.yaml the verl in the image is; None where that cannot be known here."""
    verl = ((facts.manifest if facts else None) or {}).get("features", {}).get("verl")
    return verl if isinstance(verl, str) else None
