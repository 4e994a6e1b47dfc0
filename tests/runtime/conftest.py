"""Tests that need the trainer's packages: they run in the CPU runtime's own Python, one process for all facts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_python import WarmPython

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
def warm(python: Path) -> Iterator[WarmPython]:
    """The runtime's Python with its slow packages loaded."""
    with WarmPython(python) as warm:
        yield warm


@pytest.fixture(scope="session")
def facts(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `facts.py` found out in one process with the plugin loaded as verl loads it."""
    out = tmp_path_factory.mktemp("facts") / "facts.json"
    environment = {"PYTHONPATH": str(REPOSITORY), "VERL_USE_EXTERNAL_MODULES": "dsv4kit.plugin.cpu_platform"}
    ran = warm.run(Path(__file__).with_name("facts.py"), out, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found
