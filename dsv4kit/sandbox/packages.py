"""The Debian packages the sandbox stands on."""

from __future__ import annotations

from dsv4kit import packages

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


def require_packages() -> None:
    """Install what is missing with apt-get (the caller is root), or say in one line what to install."""
    packages.require(PROGRAMS, "the sandbox")
