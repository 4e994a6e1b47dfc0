"""Removing every trace of a sandbox from the machine, however it came about."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dsv4kit.sandbox import controller, processes
from dsv4kit.sandbox.config import FREEZER
from dsv4kit.sandbox.host import poll
from dsv4kit.sandbox.network import Network
from dsv4kit.sandbox.spec import SandboxPaths


def cgroup_root(layout: SandboxPaths) -> Path:
    """Where the nodes' freezer cgroups are."""
    return FREEZER / layout.tag


def tear_down(layout: SandboxPaths, *, wipe: bool = False) -> bool:
    """End all processes, remove links, namespaces and cgroups; True when there was any of these.

    Logs, the munge key and slurmctld's state stay (job ids go on counting) unless `wipe`. Needs no record of what was
    started, so it clears up after an `up` that was killed as well.
    """
    owned = layout.ownership.exists()
    found = owned and layout.record.exists()
    if owned:
        layout.record.unlink(missing_ok=True)
    if controller.is_alive(layout):
        controller.cancel_jobs(layout)
    controller.stop_slurmctld(layout)
    found |= processes.kill_all(layout)
    found |= Network(layout).remove()
    _remove_cgroups(cgroup_root(layout))
    if owned:
        found |= wipe
        transient = [layout.state_dir / name for name in ("run", "nodes", "dev", "bin")]
        for directory in [layout.state_dir] if wipe else transient:
            shutil.rmtree(directory, ignore_errors=True)
    return found


def _remove_cgroups(root: Path) -> None:
    def removed() -> bool:
        # A cgroup stays busy for a moment after its last process; its files cannot be unlinked, only directories.
        for directory, _, _ in os.walk(root, topdown=False):
            try:
                os.rmdir(directory)
            except OSError:
                return False
        return True

    poll(removed, 5)
