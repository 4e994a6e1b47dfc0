"""The two daemons on the host: munged and slurmctld."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

from dsv4kit.errors import UserError
from dsv4kit.sandbox import processes
from dsv4kit.sandbox.config import CONTROLLER
from dsv4kit.sandbox.host import last_line, must, poll, run, system_env
from dsv4kit.sandbox.spec import SandboxPaths

MUNGED, SLURMCTLD = "munged", "slurmctld"
_START_DEADLINE_S = 15
# slurmctld writes its state to disk at the end; a loaded machine takes a while.
_STOP_DEADLINE_S = 10
_NODES_READY_DEADLINE_S = 30
READY = {"idle", "mixed", "allocated"}


def client_env(layout: SandboxPaths) -> dict[str, str]:
    """What Slurm's commands need to find this cluster."""
    return {"SLURM_CONF": str(layout.slurm_conf)}


def start_munged(layout: SandboxPaths) -> None:
    key = layout.state_dir / "munge" / "munge.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
    options = {
        "key-file": key,
        "seed-file": key.with_name("seed"),
        "socket": layout.munge_socket,
        "pid-file": layout.state_dir / "run" / "munged.pid",
        "log-file": layout.log(MUNGED),
    }
    # --force: munged would refuse state directories that others may list, which is a matter of taste here.
    argv = ["munged", "--force", *(f"--{name}={value}" for name, value in options.items())]
    must(argv, env=system_env(processes.mark(layout, MUNGED)))


def start_slurmctld(layout: SandboxPaths, address: str, port: int) -> None:
    """Start slurmctld and wait until it listens."""
    script = layout.state_dir / "bin" / "controller_init.sh"
    argv = ["unshare", "--uts", "--mount", "--propagation", "private", str(script), CONTROLLER]
    must(argv, env=system_env({**client_env(layout), **processes.mark(layout, SLURMCTLD)}))

    up = False

    def settled() -> bool:
        nonlocal up
        up = listens(address, port)
        return up or not processes.find(layout, SLURMCTLD)

    poll(settled, _START_DEADLINE_S)
    if not up:
        log = layout.log(SLURMCTLD)
        raise UserError(f"slurmctld of sandbox {layout.name} did not start: {last_line(log)} ({log})")


def stop_slurmctld(layout: SandboxPaths) -> None:
    """End slurmctld so that it saves its state; after the deadline the hard way."""
    found = processes.find(layout, SLURMCTLD)
    for process in found:
        processes.send(process, signal.SIGTERM)
    poll(lambda: all(map(processes.is_gone, found)), _STOP_DEADLINE_S)
    processes.kill_all(layout, SLURMCTLD)


def is_alive(layout: SandboxPaths) -> bool:
    """True while both daemons run."""
    return {MUNGED, SLURMCTLD} <= {process.role for process in processes.find(layout)}


def listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def node_states(layout: SandboxPaths) -> dict[str, str]:
    """Node name -> state as sinfo prints it (`idle`, `down*`, ...); empty while the controller does not answer."""
    done = run(["sinfo", "-h", "-N", "-o", "%N %T"], env=system_env(client_env(layout)), timeout_s=60)
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines()) if done.returncode == 0 else {}


def wait_ready(layout: SandboxPaths, nodes: list[str]) -> None:
    """Wait until Slurm can start jobs on all of `nodes`."""
    states: dict[str, str] = {}

    def ready() -> bool:
        states.update(node_states(layout))
        return all(states.get(node) in READY for node in nodes)

    if not poll(ready, _NODES_READY_DEADLINE_S, every_s=0.05):
        bad = ", ".join(f"{node} {states.get(node, 'unknown')}" for node in nodes if states.get(node) not in READY)
        raise UserError(
            f"sandbox {layout.name}: not ready after {_NODES_READY_DEADLINE_S} s: {bad} ({layout.log('*')})"
        )


def cancel_jobs(layout: SandboxPaths) -> None:
    """Cancel every job, so that none starts by itself when the sandbox comes up the next time."""
    # A controller that does not answer is about to be killed anyway.
    with contextlib.suppress(UserError):
        run(["scancel", "--partition=main"], env=system_env(client_env(layout)), timeout_s=10)
