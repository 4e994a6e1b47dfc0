"""One process at a time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4kit.locking import held

HOLD = """
import pathlib, sys, time
from dsv4kit.locking import held
with held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_second_one_says_that_it_waits_and_has_the_lock_of_one_that_is_killed(tmp_path: Path, kind: str) -> None:
    lock = tmp_path / "lock" if kind == "file" else tmp_path
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE) as other:
        assert other.stdout
        assert other.stdout.readline() == b"held\n"
        waited = []
        with held(lock, lambda: waited.append(other.send_signal(signal.SIGKILL))):
            assert other.wait() == -signal.SIGKILL
        assert len(waited) == 1


def test_a_free_lock_is_had_at_once(tmp_path: Path) -> None:
    for _ in range(2):
        with held(tmp_path / "lock", lambda: pytest.fail("nobody has it")):
            assert (tmp_path / "lock").is_file()
