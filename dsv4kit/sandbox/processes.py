"""Finding and ending a sandbox's processes by a mark in their environment, never by program name.

Every process the sandbox starts carries its state directory and its role (`munged`, `slurmctld` or a node's name).
That holds when a pid file is lost or stale, or when `up` itself was killed halfway, so there are no pid files to trust.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.errors import UserError
from dsv4kit.sandbox.host import poll
from dsv4kit.sandbox.spec import SandboxPaths

STATE_VARIABLE = "DSV4KIT_SANDBOX_STATE"
ROLE_VARIABLE = "DSV4KIT_SANDBOX_ROLE"


def mark(layout: SandboxPaths, role: str) -> dict[str, str]:
    """The environment variables a process of this sandbox is known by."""
    return {STATE_VARIABLE: str(layout.state_dir), ROLE_VARIABLE: role}


@dataclass(frozen=True)
class Process:
    """One process: its pid, and its start time (clock ticks since boot), which a reused pid does not share."""

    pid: int
    start_ticks: int
    role: str


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process, None when there is none."""
    try:
        # The command's name comes second, in brackets, and may itself hold blanks and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def is_gone(process: Process) -> bool:
    """True once the process has ended; a zombie counts as ended, since a host's pid 1 may be slow to reap it."""
    stat = _stat(process.pid)
    return stat is None or stat[0] in "ZX" or stat[1] != process.start_ticks


def find(layout: SandboxPaths, role: str | None = None) -> list[Process]:
    """The live processes of this sandbox, of one role where given."""
    wanted = f"{STATE_VARIABLE}={layout.state_dir}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/environ", "rb") as file:
                environ = file.read()
        except OSError:
            continue
        if wanted not in environ:
            continue
        pairs = dict(pair.partition(b"=")[::2] for pair in environ.split(b"\0"))
        stat = _stat(int(entry.name))
        if pairs.get(STATE_VARIABLE.encode()) != bytes(layout.state_dir) or stat is None or stat[0] in "ZX":
            continue
        process = Process(int(entry.name), stat[1], pairs.get(ROLE_VARIABLE.encode(), b"").decode())
        if role in (None, process.role):
            found.append(process)
    return found


def namespace_pid(process: Process) -> int:
    """The process's pid in its own (innermost) pid namespace; 0 when it has ended."""
    try:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except OSError:
        pass
    return 0


def send(process: Process, number: signal.Signals) -> None:
    """Signal exactly this process: the pid file descriptor pins it between the check and the signal."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if not is_gone(process):
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def kill(processes: Iterable[Process], deadline_s: float = 10) -> None:
    """SIGKILL the processes and wait until they have ended."""
    targets = list(processes)
    for process in targets:
        send(process, signal.SIGKILL)
    if not poll(lambda: all(map(is_gone, targets)), deadline_s):
        left = [str(process.pid) for process in targets if not is_gone(process)]
        raise UserError(f"processes {', '.join(left)} of the sandbox are still there {deadline_s:g} s after SIGKILL")


def kill_all(layout: SandboxPaths, role: str | None = None) -> bool:
    """SIGKILL everything of this sandbox (of one role), also what was being started meanwhile; True when any was."""
    any_found = False
    while found := find(layout, role):
        any_found = True
        kill(found)
    return any_found
