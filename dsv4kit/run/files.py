"""Small files on a shared file system: one writer and many readers each, no locks: none can be trusted there."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """`text` as the whole file: a reader sees the old file or the new one, never a half, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """`content` as the whole JSON file, see `write_text`."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any | None:
    """The file's content, or None while it does not exist or cannot be read as JSON."""
    with contextlib.suppress(OSError):
        os.scandir(path.parent).close()  # an NFS client looks again at a directory it is asked to list
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def tail(path: Path, lines: int = 3) -> list[str]:
    """The last lines of a text file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def append_json(path: Path, content: Any) -> None:
    """One more line of JSON, in one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content, ensure_ascii=False) + "\n")


def read_json_lines(path: Path) -> list[Any]:
    """All whole lines; a line cut short by a crash is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    contents = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            contents.append(json.loads(line))
    return contents
