"""The site's setup commands on this node: run once, before anything else, and what they export kept."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dsv4kit.node import processes
from dsv4kit.run.files import tail
from dsv4kit.run.node_spec import NodeSpec

# The shell's own, which say nothing about the trainer's environment.
_SHELL = ("_", "SHLVL", "PWD", "OLDPWD")


class SetupError(Exception):
    """The commands failed; the text says how, with the end of their output."""


def run(spec: NodeSpec, env: Mapping[str, str], log: Path) -> dict[str, str]:
    """The environment after the commands; `env` itself where there are none. Their output goes to `log`.

    They run in one bash, the first that fails ends it. Raises SetupError also after `spec.setup_limit_s` seconds.
    """
    if not spec.setup:
        return dict(env)
    # The environment may hold secrets: it leaves the shell through a file of this user's alone, gone right after.
    with tempfile.NamedTemporaryFile(dir=spec.scratch_dir) as after:
        script = "\n".join([*spec.setup, f"env -0 > /proc/self/fd/{after.fileno()}"])
        process = _start(script, env, log, after.fileno(), log.parent)
        try:
            status = process.wait(spec.setup_limit_s)
        except subprocess.TimeoutExpired:
            processes.end(process)
            raise SetupError(f"setup: still running after {spec.setup_limit_s:.0f} s") from None
        if status != 0:
            raise SetupError(f"setup: ended with status {status}: {' / '.join(tail(log, 2))}")
        content = Path(after.name).read_bytes().decode(errors="surrogateescape")
    pairs = (entry.partition("=") for entry in content.split("\0") if entry)
    return {name: value for name, _, value in pairs if name not in _SHELL}


def _start(script: str, env: Mapping[str, str], log: Path, kept: int, cwd: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=(kept,),
        )
