"""What is known of an image file, in `<file>.json` and `<file>.sha256` beside it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4kit.image import contents
from dsv4kit.run.files import put_in_place, write_json, write_text


@dataclass(frozen=True)
class Record:
    """`stack_hash`: of everything the image was built from; None for an image that was only imported.

    `mtime_ns` and `size_bytes` tell whether the file is still the one that was written.
    """

    source: str
    architecture: str
    sha256: str
    size_bytes: int
    mtime_ns: int
    written_by: str
    stack_hash: str | None = None
    hardware: str | None = None
    manifest: dict[str, Any] | None = None


def beside(image: Path) -> Path:
    """Where the record of an image is."""
    return image.with_name(f"{image.name}.json")


def load(image: Path) -> Record | None:
    """The record, if there is one and the file is still the one it is about."""
    try:
        found = Record(**json.loads(beside(image).read_text(encoding="utf-8")))
        status = image.stat()
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    if not _is_whole(found):
        return None
    return found if (status.st_size, status.st_mtime_ns) == (found.size_bytes, found.mtime_ns) else None


def _is_whole(found: Record) -> bool:
    texts = (found.source, found.architecture, found.sha256, found.written_by)
    maybe = [text for text in (found.stack_hash, found.hardware) if text is not None]
    described = found.manifest is None or contents.is_manifest(found.manifest)
    return described and all(isinstance(text, str) for text in (*texts, *maybe))


def put(temporary: Path, image: Path, **known: Any) -> Record:
    """Gives a finished file its name, and writes its record; a reader sees the old image or the new one.

    `known` are the fields that the file itself does not show.
    """
    status = temporary.stat()
    record = Record(sha256=sha256(temporary), size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, **known)
    for old in (beside(image), image.with_name(f"{image.name}.sha256")):
        old.unlink(missing_ok=True)  # first: a record must never stand beside a file it is not about
    put_in_place(temporary, image)
    write_json(beside(image), dataclasses.asdict(record))
    write_text(image.with_name(f"{image.name}.sha256"), f"{record.sha256}  {image.name}\n")
    return record


def sha256(path: Path) -> str:
    """As `sha256sum` prints it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
