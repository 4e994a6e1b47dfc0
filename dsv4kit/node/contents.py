"""Whether the packages of this node's Python have what the run needs: seconds, and nothing is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

# Reading a few dozen files; over a slow shared file system minutes.
_LIMIT_S = 300
_SHOWN = 3


def problems(needs: Mapping[str, Any]) -> list[str]:
    """One line at most: what is missing, and what has it. `needs` as in `NodeSpec`; empty: nothing is looked for."""
    if not needs:
        return []
    asked = [f"{key}={json.dumps(value)}" for key, value in needs["asked"].items()]
    command = [sys.executable, "-m", "dsv4kit.plugin.needs", needs["model"], needs["recipe"], *needs["fields"], *asked]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return [f"what is installed: not read after {_LIMIT_S} s"]
    try:
        report = json.loads(done.stdout)
    except ValueError:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        return [f"what is installed: cannot be read with {sys.executable}: {said[-1][:300]}"]
    return told(report, str(needs.get("stack", "")))


def told(report: Mapping[str, Any], stack: str) -> list[str]:
    """The report of `plugin.needs` as one line; none where all is there."""
    missing = report["missing"]
    if not missing:
        return []
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items()) or "none of its packages"
    has = f"; an image of the stack {stack} has all of it" if stack else ""
    return [
        f"what is installed cannot run {report['recipe']} of {report['model']}: {'; '.join(missing[:_SHOWN])}{more}"
        f" (found: {versions}){has}"
    ]
