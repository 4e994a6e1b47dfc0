"""What a killed submission left beside the runs goes with the next one; what a living one is making stays."""

import os
import subprocess
from pathlib import Path

from file_queue import Cluster

from dsv4kit.launch.leftovers import sweep

HOST = os.uname().nodename


def staged(runs: Path, name: str) -> Path:
    path = runs / name
    (path / "kit").mkdir(parents=True)
    return path


def test_only_what_nobody_makes_any_more_is_deleted(tmp_path: Path) -> None:
    over = subprocess.Popen(["true"])
    over.wait()
    left = staged(tmp_path, f".a.run.{HOST}.{over.pid}.140000")
    living = staged(tmp_path, f".second.{HOST}.{os.getpid()}.140000")
    of_another_host = staged(tmp_path, f".third.login7.{over.pid}.140000")
    old = staged(tmp_path, ".fourth.login7.1.140000")
    os.utime(old, (1, 1))
    run = staged(tmp_path, "run")
    other = tmp_path / ".x.y.1.2"
    other.mkdir()
    os.utime(other, (1, 1))
    (tmp_path / f".link.{HOST}.{over.pid}.1").symlink_to(run)
    assert sweep(tmp_path) == [f"deleted {path}: left by a submission that was killed" for path in sorted([left, old])]
    assert all(path.is_dir() for path in (living, of_another_host, run, other))


def test_the_next_submission_does_it(cluster: Cluster) -> None:
    runs = cluster.run.path.parent
    left = staged(runs, ".killed.login7.1.140000")
    os.utime(left, (1, 1))
    said: list[str] = []
    cluster.submit(said.append)
    assert said[0] == f"deleted {left}: left by a submission that was killed"
    assert [path.name for path in runs.iterdir()] == ["first"]


def test_no_directory_of_runs_yet_is_nothing(tmp_path: Path) -> None:
    assert sweep(tmp_path / "runs") == []
