"""Small files on a shared file system: one writer and many readers each, no locks: none can be trusted there.

`put_in_place` is the kit's only way to replace a file, whatever is written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """`content` as the whole file: a reader sees the old file or the new one, never a half, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacement(path) as temporary, temporary.open("wb") as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """`text` as the whole file, see `write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, content: Any) -> None:
    """`content` as the whole JSON file, see `write_bytes`."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; what lies there at the end replaces `path`, and after an error it is deleted.

    For a file that another program writes, or that is too large to be held in memory.
    """
    temporary = path.with_name(temporary_name(path.name))
    try:
        yield temporary
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(name: str) -> str:
    """The name a file has while this thread writes it; a leading dot keeps it out of every `*` of a reader."""
    return f".{name}.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}"


def is_version_of(name: str, of: str) -> bool:
    """Whether the file `name` is `of`, or was left behind by a process that died while it wrote `of`."""
    return name == of or name.startswith(f".{of}.")


def put_in_place(temporary: Path, path: Path) -> None:
    """Renames a file that is written, over what was there: content and name are on disk before this returns."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes the renames in `directory` survive a power cut, where the file system can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any | None:
    """The file's content, or None while it does not exist or cannot be read as JSON."""
    with contextlib.suppress(OSError):
        os.scandir(path.parent).close()  # an NFS client looks again at a directory it is asked to list
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file; empty where there is none (yet)."""
    content = read_json(path)
    return content if isinstance(content, dict) else {}


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


class GrowingFile:
    """A file that another process appends lines to; each line is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._rest = b""

    def new_lines(self) -> list[bytes]:
        """The whole lines since the last call, without their ends; from the beginning if the file was begun anew."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size == self._read:
                    return []
                if size < self._read:
                    self._read, self._rest = 0, b""
                file.seek(self._read)
                content = file.read()
        except OSError:
            return []
        self._read += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        return whole
