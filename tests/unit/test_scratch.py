"""What killed agents left in a node's scratch goes; what a living one has stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from dsv4kit.node.scratch import Scratch

CLAIM = """
import sys, time
from pathlib import Path
from dsv4kit.node.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]))
scratch.claim()
(scratch.path / "session").mkdir()
print("claimed", flush=True)
time.sleep(600)
"""


def agent(path: Path) -> subprocess.Popen[str]:
    """Another job's agent, in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", CLAIM, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "claimed\n"
    return process


def test_the_directory_of_a_killed_agent_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    killed, living = agent(tmp_path / "ray-7-0"), agent(tmp_path / "ray-8-1")
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        own = Scratch(tmp_path / "ray-9-0")
        own.claim()
        assert own.sweep() == [f"deleted {tmp_path}/ray-7-0: left by job 7, whose agent is gone"]
        assert sorted(os.listdir(tmp_path)) == ["ray-8-1", "ray-9-0"]
        assert (tmp_path / "ray-8-1" / "session").is_dir()
    finally:
        living.kill()
        living.wait()
    own.remove()
    assert os.listdir(tmp_path) == ["ray-8-1"]


def test_what_is_not_the_kits_stays(tmp_path: Path) -> None:
    """Also what an older kit made, of which nothing tells whether its job is over."""
    for name in ("ray", "ray-1", "ray-x-0", "ray-5-0", "ray-5-0.bak", "session_latest"):
        (tmp_path / name).mkdir()
    (tmp_path / "ray-5-0.bak" / ".agent").touch()
    elsewhere = tmp_path / "mine"
    elsewhere.mkdir()
    (elsewhere / ".agent").touch()
    (tmp_path / "ray-6-0").symlink_to(elsewhere)
    assert Scratch(tmp_path / "ray-9-0").sweep() == []
    assert len(os.listdir(tmp_path)) == 8


def test_a_scratch_that_is_not_there_has_nothing_left(tmp_path: Path) -> None:
    assert Scratch(tmp_path / "none" / "ray-9-0").sweep() == []
