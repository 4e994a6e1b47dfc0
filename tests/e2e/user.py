"""The user's way: the console script, with a sandbox and a runs directory of the tests' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dsv4kit.sandbox.spec import ROOT_VARIABLE

ROOT = Path(__file__).parents[2]


class Kit:
    """`dsv4kit` as a user calls it, with everything below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = root / "runs"
        self.env = {**os.environ, ROOT_VARIABLE: str(root / "sandboxes"), "DSV4KIT_RUNS": str(self.runs)}

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dsv4kit.cli.main", *words]
        return subprocess.run(
            command, cwd=ROOT, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def status(self, run: str) -> dict[str, Any]:
        """`dsv4kit status --json`."""
        content: dict[str, Any] = json.loads(self("status", run, "--json").stdout)
        return content

    def run(self, run: str, *words: str) -> str:
        """Submits a run and follows it to its end, which must be a good one."""
        done = self("submit", "--hw=cpu", f"--run={run}", *words)
        assert done.returncode == 0, done.stdout
        return done.stdout
