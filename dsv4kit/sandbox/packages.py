"""The Debian packages the sandbox stands on."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from dsv4kit.errors import UserError
from dsv4kit.sandbox.host import SYSTEM_PATH, run, system_env

# Program -> the package that has it.
PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
    "mknod": "coreutils",
    "bash": "bash",
}


def missing_packages() -> list[str]:
    """Names of the packages whose programs are not on this machine, sorted."""
    return sorted({package for program, package in PROGRAMS.items() if not shutil.which(program, path=SYSTEM_PATH)})


def require_packages() -> None:
    """Install what is missing with apt-get (the caller is root), or say in one line what to install."""
    missing = missing_packages()
    if not missing:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if not Path("/etc/debian_version").exists() or not shutil.which("apt-get", path=SYSTEM_PATH):
        raise UserError(f"the sandbox needs {', '.join(missing)} (names of Debian packages); install them first")
    print(f"dsv4kit: installing {' '.join(missing)} (apt-get)", file=sys.stderr, flush=True)
    # A fresh container has no package lists yet, so a first failure is not the last word.
    for step in (command, ["apt-get", "update"], command):
        done = run(step, env=system_env({"DEBIAN_FRONTEND": "noninteractive"}), timeout_s=600)
        if step is command and done.returncode == 0 and not missing_packages():
            return
    lines = done.stderr.strip().splitlines() or ["no message"]
    raise UserError(f"`{' '.join(command)}` failed: {lines[-1]}")
