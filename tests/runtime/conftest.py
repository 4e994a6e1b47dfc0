"""Tests that need the trainer's packages: they run in the CPU runtime's own Python, one process for all facts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dsv4kit.errors import UserError
from dsv4kit.sandbox.runtime import runtime_python

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def python() -> Path:
    try:
        return runtime_python(install=False)
    except UserError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def facts(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `facts.py` found out in one process with the plugin loaded as verl loads it."""
    out = tmp_path_factory.mktemp("facts") / "facts.json"
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "VERL_USE_EXTERNAL_MODULES": "dsv4kit.plugin.cpu_platform",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE"):
        environment.pop(name, None)
    script = Path(__file__).with_name("facts.py")
    ran = subprocess.run([python, script, out], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found
