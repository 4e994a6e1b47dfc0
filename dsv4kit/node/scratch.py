"""The kit's directories in a node's scratch, and what was left there by agents that were killed.

An attempt's is named by its job, that of a run's compiled kernels by the run. The agent holds a lock on a file in it:
the kernel drops that with the agent, however it ends, and whichever container it is in. So what nobody holds belongs to
nobody; Slurm need not be asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"ray-(?P<job>[0-9]+)-[0-9]+|kernels-[0-9a-f]{8}")
_LOCK = ".agent"


class Scratch:
    """The directory `path`, this agent's as long as it lives; scratch is local to the node, so locks can be trusted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def claim(self) -> None:
        """Makes the directory. Raises OSError where scratch cannot be written, of which the preflight speaks."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        begun = self.path / f"{_LOCK}.{os.getpid()}"
        self._descriptor = os.open(begun, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        os.rename(begun, self.path / _LOCK)  # it is held from the first moment it is there

    def claim_empty(self) -> None:
        """The same, without what an agent that is gone left there. Raises OSError also where another agent lives."""
        if self.path.exists():
            if not _is_left(self.path):
                raise FileExistsError(f"{self.path} is in use")
            shutil.rmtree(self.path)
        self.claim()

    def sweep(self) -> list[str]:
        """Deletes this user's directories beside it whose agents are gone; a readable line each."""
        done = []
        with contextlib.suppress(OSError):
            for entry in sorted(os.scandir(self.path.parent), key=lambda entry: entry.name):
                path = Path(entry.path)
                if path != self.path and (match := _NAME.fullmatch(entry.name)) and _is_left(path):
                    shutil.rmtree(path, ignore_errors=True)
                    whose = f"job {match['job']}, whose agent" if match["job"] else "an agent that"
                    done.append(f"deleted {path}: left by {whose} is gone")
        return done

    def remove(self) -> None:
        """Deletes the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _is_left(path: Path) -> bool:
    """Whether it is an own directory that an agent has claimed and holds no more."""
    try:
        status = os.lstat(path)
        if not os.path.isdir(path) or os.path.islink(path) or status.st_uid != os.getuid():
            return False
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
