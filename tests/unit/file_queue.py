"""A queue of files in place of Slurm, and the verbs said to it: for tests of submitting and resuming."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4kit.cli import main
from dsv4kit.config.loading import Override, load_settings, load_site
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.submission import Submission
from dsv4kit.run.directory import RunDir

QUEUE = """#!/bin/bash
cd "$(dirname "$0")/.." || exit 1
echo "$(basename "$0") $*" >> calls
cat notice 2>/dev/null
case $(basename "$0") in
  sinfo) for n in 1 2 3 4; do echo "dsv4kit|n$n|idle|main*"; done ;;
  sbatch)
    number=$(($(cat number 2>/dev/null || echo 0) + 1))
    [ "$number" != "$(cat refuse 2>/dev/null)" ] || { cat reasons >&2; exit 1; }
    echo "$number" > number; name=$(sed -n 's/^#SBATCH --job-name=//p' "${@: -1}")
    [ ! -e silent ] || name=else
    echo "$name|$*" > "jobs/$number"; cat said 2>/dev/null || echo "$number" ;;
  squeue) [ ! -e down ] || { echo "squeue: error: timed out" >&2; exit 1; }
    for job in $(ls jobs); do
      IFS='|' read -r name options < "jobs/$job"
      waits=$(sed -n 's/.*--dependency=\\([^ ]*\\).*/\\1/p' <<< "$options"); [ ! -e loose ] || waits="(null)"
      [[ " $* " != *" -j "* || " $* " == *" -j $job "* ]] || continue
      case "$*" in
        *%E*) echo "dsv4kit|$job|PENDING|$waits|$name" ;;
        *%R*) echo "dsv4kit|$job|PENDING|$name|Dependency" ;;
        *) echo "dsv4kit|$job|PENDING" ;;
      esac
    done ;;
  scancel) [ ! -e down ] && [ ! -e stuck ] || { echo "scancel: error: timed out" >&2; exit 1; }
    [ -e deaf ] || rm -f jobs/* ;;
esac
"""


class Cluster:
    """A queue of files; `refuse` holds the number of the job sbatch refuses, `down` makes the others fail."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bin").mkdir()
        (root / "jobs").mkdir()
        for name in ("sinfo", "sbatch", "squeue", "scancel"):
            (root / "bin" / name).write_text(QUEUE)
            (root / "bin" / name).chmod(0o755)
        self.slurm = Slurm({"PATH": f"{root / 'bin'}:/usr/bin:/bin"})
        self.run = RunDir(root / "runs" / "first")

    @property
    def jobs(self) -> list[str]:
        return sorted(path.name for path in (self.root / "jobs").iterdir())

    def submission(self, *overrides: Override) -> Submission:
        """Three segments, and no spare one unless the test asks for it."""
        resolved = load_settings("cpu", "tiny", "grpo", [Override("schedule.spare_segments", 0, "test"), *overrides])
        return Submission(resolved, load_site("sandbox"), self.run, self.slurm, sys.executable, "/m", "/d")

    def submit(self, progress: Callable[[str], None] = lambda line: None) -> None:
        submission = self.submission()
        submission.check()
        submission.check_cluster()
        submission.submit(progress)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.fixture
def say(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the console script on a run of another site than the sandbox; returns status, output and errors."""
    monkeypatch.setenv("DSV4KIT_RUNS", str(cluster.run.path.parent))
    monkeypatch.setenv("PATH", f"{cluster.root / 'bin'}:/usr/bin:/bin")
    cluster.submit()
    frozen = (cluster.run.path / "run.yaml").read_text()
    (cluster.run.path / "run.yaml").write_text(frozen.replace("name: sandbox", "name: elsewhere"))

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dsv4kit", *words])
        status = main.main()
        out, err = capsys.readouterr()
        return f"{status} {out}{err}"

    return run
