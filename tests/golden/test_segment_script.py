"""The batch script, as text to review and as a program: shellcheck, and bash with stand-ins for Slurm's commands."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4kit import quoting
from dsv4kit.config.loading import load_settings, load_site
from dsv4kit.launch.executor import SegmentExecutor
from dsv4kit.launch.render import SegmentScript, conclude_text
from dsv4kit.launch.slurm import Slurm
from dsv4kit.run.directory import RunDir


def script(run: Path, segment: int = 1, **slurm: Any) -> SegmentScript:
    site = load_site("sandbox")
    site = site.model_copy(update={"slurm": site.slurm.model_copy(update=slurm)})
    return SegmentScript(load_settings("cpu", "tiny", "grpo").settings, site, RunDir(run), segment)


def executor(run: Path, after: str | None = None) -> SegmentExecutor:
    return SegmentExecutor(run / "segments/0001/submitit", script(run), "/env/bin/python", Slurm(), after)


def test_the_script_of_the_main_job(golden: Callable[[str, str], None]) -> None:
    golden("segment-cpu.sbatch", executor(Path("/shared/runs/first")).script_text())


def test_a_site_with_everything_set(golden: Callable[[str, str], None]) -> None:
    full = script(
        Path("/shared/50% full, with spaces/full"),
        partition="batch",
        account="llm",
        qos="high",
        gpu_option="gres",
        requeue=False,
        extra=["--reservation=maintenance", "--comment=a"],
    )
    golden("segment-full.sbatch", full.render("python -m payload"))


def test_a_chain_of_which_two_jobs_may_be_in_the_queue(golden: Callable[[str, str], None]) -> None:
    limited = dataclasses.replace(script(Path("/shared/runs/first"), chain=2), last=5)
    golden("segment-limited.sbatch", limited.render("python -m payload"))


def test_one_segment_at_a_time_in_the_order_of_the_chain_and_with_an_environment_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    sbatch = ["sbatch", "--parsable", "--export-file=/r/segments/0001/job.env"]
    assert executor(Path("/r")).sbatch_command("/r/script") == [*sbatch, "--dependency=singleton", "/r/script"]
    later = executor(Path("/r"), after="41").sbatch_command("/r/script")
    assert later == [*sbatch, "--dependency=singleton,afterany:41", "/r/script"]
    monkeypatch.setenv("SBATCH_QOS", "else")
    assert executor(Path("/r")).sbatch_command("/r/script")[:4] == ["env", "-u", "SBATCH_QOS", "sbatch"]


@pytest.mark.parametrize("name", ["segment-cpu.sbatch", "segment-full.sbatch", "segment-limited.sbatch"])
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")  # of the locked development environment
    done = subprocess.run([shellcheck, Path(__file__).parent / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# One of each kind.
STEERING = (
    "SLURM_CPU_BIND",
    "SBATCH_QOS",
    "SQUEUE_PARTITION",
    "SCANCEL_STATE",
    "SINFO_FORMAT",
    "SRUN_CPUS_PER_TASK",
    "SCONTROL_ALL",
    "SLURM_CLUSTERS",
    "SLURM_TIME_FORMAT",
    "SLURM_JWT",
    "PMIX_RANK",
)


class Host:
    """A batch host whose Slurm commands are scripts that note how they were called."""

    def __init__(self, root: Path) -> None:
        self.run = root / "it's a `$dir`" / "run"
        self.segment = self.run / "segments" / "0001"
        self.segment.mkdir(parents=True)
        (self.segment / "conclude.sh").write_text(conclude_text())
        self.bin = root / "bin"
        self.bin.mkdir()
        self.calls = root / "calls"
        self.calls.touch()
        self.command("scancel", "")
        self.command("scontrol", '[[ $* == *hostnames* ]] && echo "${3//,/$IFS}"; exit 0')
        self.command("sinfo", 'for n in 1 2 3 4; do echo "dsv4kit|n$n|idle"; done')
        self.command("squeue", "echo note 99; echo 'dsv4kit|12'; echo 'dsv4kit|13'; echo 14")

    def command(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {quoting.shell(str(self.calls))}\n{body}\n')
        path.chmod(0o755)

    def start(self) -> "subprocess.Popen[str]":
        text = script(self.run).render("payload")
        env = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", **dict.fromkeys(STEERING, "else")}
        return subprocess.Popen(
            ["bash", "-c", text], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def finish(self) -> tuple[int, str]:
        process = self.start()
        output, _ = process.communicate(timeout=20)
        return process.returncode, output

    def verdict(self, verdict: str) -> str:
        return f"echo {verdict} > {quoting.shell(str(self.segment))}/verdict"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize(("verdict", "status"), [("finished", 0), ("stop", 1)])
def test_the_end_of_the_run_cancels_the_segments_still_waiting(host: Host, verdict: str, status: int) -> None:
    host.command("srun", host.verdict(verdict))
    assert host.finish()[0] == status
    assert f"scancel --me --name={RunDir(host.run).job_name} --state=PENDING" in host.calls.read_text()


def test_a_segment_that_goes_on_cancels_nothing(host: Host) -> None:
    host.command("srun", host.verdict("continue"))
    assert host.finish()[0] == 0
    assert "scancel" not in host.calls.read_text()
    assert "scontrol" not in host.calls.read_text()


def test_nodes_to_avoid_are_passed_on_to_every_waiting_segment(host: Host) -> None:
    host.command(
        "srun", f"printf n1,n2 > {quoting.shell(str(host.segment))}/excluded_nodes; {host.verdict('continue')}"
    )
    host.finish()
    calls = host.calls.read_text()
    assert "scontrol update JobId=12 ExcNodeList=n1,n2" in calls
    assert "scontrol update JobId=13 ExcNodeList=n1,n2" in calls
    assert calls.count("scontrol update") == 2


def test_a_squeue_without_an_answer_is_told_and_fails_nothing(host: Host) -> None:
    host.command("squeue", "exit 1")
    host.command("srun", f"echo n1 > {quoting.shell(str(host.segment))}/excluded_nodes; {host.verdict('continue')}")
    status, output = host.finish()
    assert (status, "the waiting segments were not told to avoid n1" in output) == (0, True)


def test_agents_that_left_no_verdict_are_one_attempt_without_progress_and_the_chain_goes_on(host: Host) -> None:
    host.command("srun", "exit 143")
    status, output = host.finish()
    assert status == 0
    assert "next continue, srun status 143" in output
    assert (host.segment / "attempt-0" / "outcome.json").exists()
    assert "scancel" not in host.calls.read_text()


def test_a_verdict_of_an_earlier_attempt_does_not_count(host: Host) -> None:
    (host.segment / "verdict").write_text("finished\n")
    host.command("srun", "exit 1")
    assert "next continue" in host.finish()[1]


def test_a_run_directory_that_is_gone_uses_up_no_further_segment(host: Host) -> None:
    (host.segment / "conclude.sh").unlink()
    host.command("srun", "exit 1")
    status, output = host.finish()
    assert (status, "cannot be read; the waiting segments are held" in output) == (1, True)
    assert f"scontrol hold jobname={RunDir(host.run).job_name}" in host.calls.read_text()


def test_there_is_one_srun_with_a_scrubbed_environment(host: Host) -> None:
    host.command("srun", f"env > {quoting.shell(str(host.run))}/env; {host.verdict('continue')}")
    host.finish()
    calls = [line for line in host.calls.read_text().splitlines() if line.startswith("srun")]
    assert len(calls) == 1
    assert "--kill-on-bad-exit=1" in calls[0]
    seen = dict(line.split("=", 1) for line in (host.run / "env").read_text().splitlines() if "=" in line)
    assert [name for name in STEERING if name in seen] == []
    assert seen["RAY_AUTH_MODE"] == "token"
    assert len(seen["RAY_AUTH_TOKEN"]) == 64
    assert seen["PYTHONPATH"] == f"{host.run}/kit"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_do_not_end_the_script_before_the_agents(host: Host, number: signal.Signals) -> None:
    where = quoting.shell(str(host.run))
    wait = f"touch {where}/up; while [ ! -e {where}/go ]; do sleep 0.05; done"
    host.command("srun", f"{wait}; {host.verdict('continue')}")
    process = host.start()
    while not (host.run / "up").exists():
        time.sleep(0.01)
    process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    assert (host.segment / "STOP").exists() == (number == signal.SIGUSR1)
    (host.run / "go").touch()
    assert process.wait(timeout=20) == 0
