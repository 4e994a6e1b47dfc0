"""The state directory: its subdirectories, and the record of a sandbox that is up."""

from __future__ import annotations

import dataclasses
import json
import shutil
from ipaddress import IPv4Network
from pathlib import Path

from dsv4kit.errors import UserError
from dsv4kit.sandbox.host import must
from dsv4kit.sandbox.spec import ROOT_VARIABLE, SandboxPaths, SandboxSpec

PUBLIC = ("etc", "log", "run", "nodes", "dev", "bin")
PRIVATE = ("munge", "slurmctld")
SCRIPTS = ("controller_init.sh", "node_init.sh", "epilog.sh")


def make_directories(layout: SandboxPaths, gpus: int) -> None:
    """Make the state directory with the scripts and the fake GPUs; unprivileged users may read all but secrets."""
    state = layout.state_dir
    if not layout.ownership.exists() and state.exists() and any(state.iterdir()):
        raise UserError(f"{state} exists and is not a sandbox's state: choose another name or {ROOT_VARIABLE}")
    # Whatever this process's umask; directories that were there before are left as they are.
    new = [path for path in (state, *state.parents) if not path.exists()]
    state.mkdir(parents=True, exist_ok=True)
    for directory in new:
        directory.chmod(0o755)
    layout.ownership.touch()
    for name in (*PUBLIC, *PRIVATE):
        (state / name).mkdir(exist_ok=True)
        (state / name).chmod(0o700 if name in PRIVATE else 0o755)
    # Copies: every node sees the state directory, wherever the kit itself is.
    for script in SCRIPTS:
        shutil.copyfile(Path(__file__).with_name(script), state / "bin" / script)
        (state / "bin" / script).chmod(0o755)
    for i in range(gpus):
        must(["mknod", "-m", "666", str(state / "dev" / f"gpu{i}"), "c", "1", "3"])


def write_record(layout: SandboxPaths, spec: SandboxSpec, subnet: IPv4Network, proctrack: str) -> None:
    record = {"spec": dataclasses.asdict(spec), "subnet": str(subnet), "proctrack": proctrack}
    layout.record.write_text(json.dumps(record, default=str, indent=1) + "\n")


def read_record(layout: SandboxPaths) -> tuple[SandboxSpec, IPv4Network, str] | None:
    """(spec, subnet, proctrack) of a sandbox that came up; None without a record, or with one that was cut short."""
    try:
        record = json.loads(layout.record.read_text())
        spec = SandboxSpec(**{**record["spec"], "root": layout.root})
        return spec, IPv4Network(record["subnet"]), str(record["proctrack"])
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, UserError):
        return None
