"""Starting processes and ending exactly those, and what they started, by pid.

Never by name: `ray stop` and its like end everybody's processes on a shared node.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
# Descendants of this process that it did not start, with the time each began (a pid can be given again): where enroot
# mounts images by squashfuse, the server of this very container's files is a child of the task.
_there_before: set[tuple[int, str]] = set()


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies: none escapes `end_descendants`.

    What is there already is left alone from now on; so this comes before anything is started.
    """
    _there_before.update((pid, _began(pid)) for pid in descendants(os.getpid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> subprocess.Popen[bytes]:
    """A process in a session of its own, its output appended to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def end(process: subprocess.Popen[bytes], grace_s: float = 10.0) -> int:
    """Ends the process and its group: SIGTERM, then SIGKILL after `grace_s`. Returns its exit status."""
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


def end_descendants(grace_s: float = 5.0) -> list[int]:
    """Ends everything this process started that is still there; returns the pids that needed it.

    SIGTERM to all, then SIGKILL to what is left, again and again while new ones appear: a tree being ended may fork.
    """
    found = _own()
    for pid in found:
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := _living()) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = _living()
    _reap()
    return found


def descendants(pid: int) -> list[int]:
    """Pids of all descendants, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            parent, state = _parent_and_state(int(entry.name))
            if state not in ("Z", ""):
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def state(pid: int) -> str:
    """Its state as one letter of /proc; empty where it is gone."""
    return _parent_and_state(pid)[1]


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal; what has none would be ended by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration, IndexError):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def _living() -> list[int]:
    """What this process started and is still there, with the dead ones reaped on the way."""
    _reap()
    return _own()


def _own() -> list[int]:
    """Descendants, without those that were there before."""
    return [pid for pid in descendants(os.getpid()) if (pid, _began(pid)) not in _there_before]


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _reap() -> None:
    """Takes leave of every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _parent_and_state(pid: int) -> tuple[int, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[1]), fields[0]
    except (OSError, IndexError, ValueError):
        return 0, ""


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
