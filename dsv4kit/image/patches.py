"""What the plugin's patches make of the packages in an image; run inside it, at the end of its build."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LIMIT_S = 900


def outcomes(driver_library_dir: Path | None = None) -> list[dict[str, Any]]:
    """One row per patch, as `python -m dsv4kit.plugin.dsv4` prints them; none in an image without Megatron.

    `driver_library_dir` has a stand-in for the driver's library, for a build host without one.
    """
    if not _megatron_is_here():
        return []
    environment = {name: value for name, value in os.environ.items() if name != "VERL_USE_EXTERNAL_MODULES"}
    if driver_library_dir is not None:
        path = [environment.get("LD_LIBRARY_PATH"), str(driver_library_dir)]
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, path))
    command = [sys.executable, "-m", "dsv4kit.plugin.dsv4"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"patch"')]
    if not rows:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return [{"patch": "the plugin", "required": True, "state": "failed", "detail": said[-1] if said else "silent"}]
    return rows


def _megatron_is_here() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def problems(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Required patches that cannot be applied: a run would refuse to start."""
    for row in rows:
        if row["required"] and row["state"] == "failed":
            yield f"patch {row['patch']!r}: {row['detail']}"


def lines(rows: list[dict[str, Any]]) -> Iterator[tuple[bool, str]]:
    """(whether it is well, what to tell a person) for each patch of a manifest."""
    for row in rows:
        detail = f" ({row['detail']})" if row.get("detail") else ""
        yield row["state"] != "failed", f"{row['patch']}: {row['state']}{detail}"
