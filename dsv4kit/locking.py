"""One process at a time: a lock that the kernel takes back from a process that dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def _nothing() -> None:
    """Waits in silence."""


@contextlib.contextmanager
def held(path: Path, waiting: Callable[[], object] = _nothing) -> Iterator[None]:
    """Holds the machine's lock on `path`: a directory, or a file that is made where it is missing.

    `waiting` is called once if somebody else has it.
    """
    lock = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
