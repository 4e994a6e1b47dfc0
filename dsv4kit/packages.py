"""Programs of Debian packages: there, installed where that is possible, or one line that says what to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from dsv4kit import locking
from dsv4kit.errors import UserError

# Debian keeps daemons and administration in sbin, which an ordinary login may lack.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMIT_S = 600
# Somebody else's apt-get is waited for.
_PATIENT = "DPkg::Lock::Timeout=300"
_DPKG = Path("/var/lib/dpkg")


def missing(programs: Mapping[str, str]) -> list[str]:
    """Of `programs` (program or absolute file -> the package that has it) the packages that are not here, sorted."""
    return sorted({package for program, package in programs.items() if not _there(program)})


def require(programs: Mapping[str, str], what: str) -> None:
    """Installs what `what` needs and is missing, with apt-get as root; raises UserError where that cannot be."""
    wanted = missing(programs)
    if not wanted:
        return
    needs = f"{what} needs {', '.join(wanted)} (names of Debian packages)"
    if not Path("/etc/debian_version").exists() or not shutil.which("apt-get", path=SYSTEM_PATH):
        raise UserError(f"{needs}; install them first")
    command = ["apt-get", "install", "-y", "--no-install-recommends", "-o", _PATIENT, *wanted]
    if os.geteuid() != 0:
        raise UserError(f"{needs}; as root: {' '.join(command)}")
    # Of two of ours the later one waits, and mostly finds that there is nothing left to do.
    with locking.held(_DPKG):
        if not missing(programs):
            return
        print(f"dsv4kit: installing {' '.join(wanted)} (apt-get)", file=sys.stderr, flush=True)
        # A fresh container has no package lists yet, so a first failure is not the last word.
        for step in (command, ["apt-get", "update"], command):
            status, said = _run(step)
            if step is command and status == 0 and not missing(programs):
                return
    raise UserError(f"`{' '.join(command)}` failed: {said}")


def _there(program: str) -> bool:
    return Path(program).exists() if program.startswith("/") else bool(shutil.which(program, path=SYSTEM_PATH))


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and last line of the errors."""
    env = {"PATH": SYSTEM_PATH, "HOME": "/root", "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            umask=0o022,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return 124, f"not done after {_LIMIT_S} s"
    return done.returncode, (done.stderr.strip().splitlines() or ["no message"])[-1]
