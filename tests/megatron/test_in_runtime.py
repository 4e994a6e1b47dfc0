"""Runs the tests of this directory in their own environment, where the one that runs pytest has no Megatron."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import environment


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None,
    reason="this environment has Megatron: the tests ran directly",
)
def test_the_megatron_suite_passes_in_its_environment() -> None:
    interpreter = environment.python()
    if interpreter is None:
        pytest.skip("no CPU runtime (`dsv4kit sandbox up` installs it)")
    assert environment.run(interpreter, environment.install(), ["-q"]) == 0
