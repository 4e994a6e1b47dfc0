"""What every Python of a segment does first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4kit.launch.freeze import freeze


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    freeze(tmp_path / "kit")
    return tmp_path / "kit"


def says(code: str, *path: Path, **env: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **env}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout.strip()


def test_the_collector_looks_as_rarely_as_the_profile_says(kit: Path) -> None:
    code = "import gc; print(gc.get_threshold()[0])"
    usual = says(code)
    assert says(code, kit) == usual
    assert says(code, kit, DSV4KIT_GC_THRESHOLD="12345") == "12345" != usual


def test_the_one_it_hides_runs_too(kit: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('the image has its own')\n")
    assert says("print('and then this')", kit, own) == "the image has its own\nand then this"
