"""Running commands on this machine, waiting with a deadline, and the lock of all changes to sandboxes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dsv4kit import locking
from dsv4kit.errors import UserError
from dsv4kit.packages import SYSTEM_PATH


def system_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of everything the sandbox starts: none of the caller's, so that a node is the same every time."""
    return {"PATH": SYSTEM_PATH, "HOME": "/root", "LC_ALL": "C", **(extra or {})}


def run(
    argv: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None, timeout_s: float = 20
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, output captured; a non-zero exit is returned, not raised."""
    try:
        return subprocess.run(
            argv,
            input=stdin,
            env=env or system_env(),
            text=True,
            errors="replace",
            capture_output=True,
            timeout=timeout_s,
            check=False,
            umask=0o022,
            cwd="/",
        )
    except FileNotFoundError:
        raise UserError(f"{argv[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"`{' '.join(argv)}` did not end within {timeout_s:g} s") from None


def must(argv: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None, timeout_s: float = 20) -> str:
    """Like `run`, returns stdout; a non-zero exit is a `UserError` with the command's last line."""
    done = run(argv, stdin=stdin, env=env, timeout_s=timeout_s)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise UserError(f"`{' '.join(argv)}` failed with exit code {done.returncode}: {lines[-1]}")
    return done.stdout


def poll(ready: Callable[[], bool], deadline_s: float, every_s: float = 0.02) -> bool:
    """Call `ready` until it is true (True) or `deadline_s` have passed (False)."""
    end = time.monotonic() + deadline_s
    while not ready():
        if time.monotonic() >= end:
            return False
        time.sleep(every_s)
    return True


def mount_points(pid: int | str = "self") -> set[str]:
    """Where something is mounted, as the process sees it (`os.path.ismount` misses a directory bound on itself)."""
    fields = (line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
    return {re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field) for field in fields}


def last_line(log: Path) -> str:
    """The last line of a log that says something, for an error message."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1] if lines else "(empty)"


def require_root() -> None:
    if os.geteuid() != 0:
        raise UserError("the sandbox needs root (it makes namespaces, network links and device files): use sudo")


@contextlib.contextmanager
def changes() -> Iterator[None]:
    """Hold the machine's one lock for changing sandboxes.

    Taken on the directory /run itself: it is there on every Linux machine, and nothing stays behind.
    """
    with locking.held(Path("/run")):
        yield
