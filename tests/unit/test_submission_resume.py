"""Resuming, with stand-ins for Slurm's commands: what may change, who is refused, and whose the checkpoints are."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from file_queue import Cluster

from dsv4kit.config.loading import Override
from dsv4kit.errors import UserError
from dsv4kit.launch import ownership
from dsv4kit.launch.changes import Asked
from dsv4kit.launch.resume import Resumption
from dsv4kit.launch.run_dir import read_record
from dsv4kit.launch.submission import Submission
from dsv4kit.run import ends, outcome
from dsv4kit.run.directory import RunDir


def test_of_two_resumes_at_once_one_is_refused(cluster: Cluster, say: Callable[..., str]) -> None:
    """Both were accepted: two chains wrote the same attempts and checkpoints."""
    say("cancel", "first")
    begun, go_on = threading.Event(), threading.Event()

    def hold(line: str) -> None:
        begun.set()
        go_on.wait(30)

    first = threading.Thread(target=Resumption(cluster.run, cluster.slurm).submit, args=(hold,))
    first.start()
    assert begun.wait(30)
    second = subprocess.Popen(
        [sys.executable, "-m", "dsv4kit.cli.main", "resume", "first"], stderr=subprocess.PIPE, text=True
    )
    _, said = second.communicate(timeout=30)
    assert f"another `resume` of it is under way: process {os.getpid()} on " in said
    assert second.returncode == 2
    go_on.set()
    first.join()
    assert len(cluster.jobs) == 3
    assert not (cluster.run.path / "resume.json").exists()
    assert "is waiting" in say("resume", "first")


def test_jobs_that_no_file_knows_of_refuse_a_resume(cluster: Cluster, say: Callable[..., str]) -> None:
    say("cancel", "first")
    (cluster.root / "jobs" / "77").write_text(f"{cluster.run.job_name}|")
    assert "RUN=first: has jobs in the queue (77); `" in say("resume", "first")


def test_another_runs_checkpoint_directory_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """It was accepted, and the other run's step, just being saved, went to quarantine."""
    theirs = tmp_path / "checkpoints of one"
    one = cluster.submission(Override("checkpoint.directory", str(theirs), "SET checkpoint.directory"))
    one.check()
    one.submit(print)

    def other(directory: Path) -> Submission:
        made = cluster.submission(Override("checkpoint.directory", str(directory), "SET checkpoint.directory"))
        return dataclasses.replace(made, run=RunDir(cluster.run.path.with_name("second")))

    (tmp_path / "link").symlink_to(theirs)
    said = rf"SET checkpoint\.directory: '.*' has the checkpoints of the run first in {cluster.run.path}"
    for directory in (theirs, theirs / "below", tmp_path / "link", tmp_path / "x" / ".." / theirs.name):
        with pytest.raises(
            UserError, match="has the checkpoints of the run first" if "link" in directory.name else said
        ):
            other(directory).check()
    with pytest.raises(UserError, match="has the checkpoints of the run first"):
        other(theirs).submit(print)  # it was free when it was looked at
    assert not cluster.run.path.with_name("second").exists()

    (theirs / ownership.OWNER).unlink()  # as of a run from before there were owners
    with pytest.raises(UserError, match="has the checkpoints of the run first"):
        other(theirs).check()
    shutil.rmtree(cluster.run.path)
    ownership.claim(theirs, RunDir(tmp_path / "removed"))
    with pytest.raises(UserError, match=r"which is gone; without .*dsv4kit-owner\.json it is free"):
        other(theirs).check()


def test_a_submission_that_fails_leaves_no_owner(cluster: Cluster, tmp_path: Path) -> None:
    theirs = tmp_path / "c"
    (cluster.root / "refuse").write_text("2")
    (cluster.root / "reasons").write_text("sbatch: error: no")
    with pytest.raises(UserError, match="sbatch refused segment 2"):
        cluster.submission(Override("checkpoint.directory", str(theirs), "SET")).submit(print)
    assert list(theirs.iterdir()) == []


def test_a_resume_in_a_directory_that_became_another_runs_is_refused(cluster: Cluster, say: Callable[..., str]) -> None:
    say("cancel", "first")
    owner = cluster.run.path / "checkpoints" / ownership.OWNER
    assert json.loads(owner.read_text())["run"] == "first"
    owner.write_text(owner.read_text().replace(cluster.run.job_name, "other-01234567"))
    assert "has the checkpoints of the run first" in say("resume", "first")
    owner.unlink()
    assert "goes on from step 0" in say("resume", "first", "--no-follow")
    assert owner.exists()


def test_a_resume_may_change_what_touches_neither_the_mathematics_nor_the_checkpoint(
    cluster: Cluster, say: Callable[..., str], tmp_path: Path
) -> None:
    say("cancel", "first")
    before = json.loads((cluster.run.path / "node.json").read_text())
    words = ["--time=0:10:00", "--save-freq=3", "--segment-steps=6", "--partition=main", "--qos=high", "--account=team"]
    words += [
        "--keep-last=3",
        "--exclude=n[1-2],n4",
        "--set=env.NCCL_DEBUG=INFO",
        "--set=watch.stall_s=77",
        "--set=hardware.min_shm_gib=3",
    ]
    said = say("resume", "first", *words, "--no-follow")
    assert said.startswith("0 run first: goes on from step 0 of 12, segments 1 to 3 are over\nchanged: "), said
    assert re.search(r"changed: schedule\.time: [\d:]+ -> 0:10:00\n", said)
    assert "changed: site.slurm.partition: None -> main\n" in said
    assert cluster.jobs == ["4", "5"]
    script = cluster.run.segment(5).script.read_text()
    wanted = {"--time=0:10:00", '--partition="main"', '--qos="high"', '--account="team"', '--exclude="n[1-2],n4"'}
    assert {line.removeprefix("#SBATCH ") for line in script.splitlines()} >= wanted
    after = json.loads((cluster.run.path / "node.json").read_text())
    assert after.keys() == before.keys()
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"segment_steps", "overrides", "env", "limits", "keep_last"}
    assert after["keep_last"] == 3
    assert {*before["overrides"]} ^ {*after["overrides"]} == {"trainer.save_freq=4", "trainer.save_freq=3"}
    assert (after["env"]["NCCL_DEBUG"], after["limits"]["stall_s"]) == ("INFO", 77)
    assert "segment 4: changed: watch.stall_s: " in say("status", "first")
    assert read_record(cluster.run)["settings"]["schedule"]["time"] == "0:10:00"
    say("cancel", "first")
    assert "changed" not in say("resume", "first", "--time=0:10:00", "--no-follow")


def test_a_secrets_file_that_others_may_read_by_now_refuses_a_resume(
    cluster: Cluster, say: Callable[..., str], tmp_path: Path
) -> None:
    say("cancel", "first")
    keys = tmp_path / "keys"
    keys.write_text("WANDB_API_KEY=x")
    keys.chmod(0o644)
    frozen = cluster.run.path / "run.yaml"
    frozen.write_text(frozen.read_text().replace("secrets_file: null", f"secrets_file: {keys}"))
    said = say("resume", "first", "--no-follow")
    assert said.startswith("2 dsv4kit: ")
    assert "its mode is 0644, not 0600 or 0400" in said
    keys.chmod(0o600)
    assert say("resume", "first", "--no-follow").startswith("0 ")


def test_of_a_long_log_the_end_is_shown_and_all_of_it_when_asked_for(
    cluster: Cluster, say: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It was 150 MB on the terminal."""
    log = cluster.run.segment(1).attempt(0).driver_log
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n" for number in range(300_000)))
    size = log.stat().st_size
    shown = say("logs", "first").splitlines()
    note = f"# the last 1 of {size / 1e6:.0f} MB; `dsv4kit logs --run first --segment 1 --all` shows all"
    assert shown[1] == note
    assert shown[-1] == "line 299999"
    assert shown[2].startswith("line ")
    assert 80_000 < len(shown) < 120_000
    assert len(say("logs", "first", "--all").splitlines()) == 300_001


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--nodes=1"],
            "NODES=1: FSDP's checkpoints have one file per process and load only",
        ),
        (["--train-file=/x.parquet"], "TRAIN_FILE=/x.parquet: a resume changes nothing of what is learned"),
        (["--set=data.train_batch_size=8"], "SET data.train_batch_size: a resume changes nothing of what is learned"),
        (["--set=optimizer.cpu_offload=true"], "the run's checkpoints hold the optimizer's state"),
        (["--verl=trainer.seed=2"], "VERL trainer.seed: a resume changes nothing of what is learned"),
        (["--time=x"], "TIME=x: schedule.time='x'"),
        (["--partition=a b"], "PARTITION=a b: partition='a b'"),
        (["--exclude=n1 n2"], "EXCLUDE=n1 n2: exclude='n1 n2': not a list of nodes"),
        (["--kit=old"], "KIT='old': `new` is the only other kit"),
        (["--site=sandbox"], "SITE='sandbox': the sandbox's Slurm knows nothing of this run's jobs"),
        (["--image=/none.sqsh"], "IMAGE: '/none.sqsh'"),
    ],
)
def test_a_resume_refuses_the_rest_with_its_reason(
    cluster: Cluster, say: Callable[..., str], words: list[str], said: str
) -> None:
    say("cancel", "first")
    before = {path: path.read_bytes() for path in cluster.run.path.glob("*.*")}
    answer = say("resume", "first", *words, "--no-follow")
    assert answer.startswith("2 dsv4kit: ")
    assert said in answer
    assert cluster.jobs == []
    assert {path: path.read_bytes() for path in cluster.run.path.glob("*.*")} == before


def test_the_kits_code_can_be_renewed_and_an_older_kits_node_json_gets_no_new_keys(
    cluster: Cluster, say: Callable[..., str]
) -> None:
    say("cancel", "first")
    agent = cluster.run.kit / "dsv4kit" / "node" / "agent.py"
    agent.write_text("an older kit's")
    path = cluster.run.path / "node.json"
    spec = json.loads(path.read_text())
    del spec["sample_interval_s"]
    path.write_text(json.dumps({**spec, "of_old": 1}))
    said = say("resume", "first", "--set=watch.sample_interval_s=9", "--no-follow")
    assert said.startswith("2 dsv4kit: sample_interval_s: this run's own kit is older and knows no such setting; `")
    say("resume", "first", "--save-freq=4", "--no-follow")
    assert json.loads(path.read_text()) == {**spec, "of_old": 1}
    say("cancel", "first")

    (cluster.root / "refuse").write_text("8")
    (cluster.root / "reasons").write_text("sbatch: error: no")
    assert "refused segment 8" in say("resume", "first", "--kit=new", "--no-follow")
    assert agent.read_text() == "an older kit's"
    (cluster.root / "refuse").unlink()
    words = ["--kit=new", "--set=watch.sample_interval_s=9"]
    assert "0 run first: goes on" in say("resume", "first", *words, "--no-follow")
    assert "run_segment" in agent.read_text()
    assert (cluster.run.path / "kit.1" / "dsv4kit" / "node" / "agent.py").read_text() == "an older kit's"
    assert json.loads(path.read_text()) == {**spec, "sample_interval_s": 9}
    assert "changed: kit: " in say("status", "first")
    assert sorted(entry.name for entry in cluster.run.path.iterdir() if "kit" in entry.name) == ["kit", "kit.1"]


def test_a_run_that_a_gate_stopped_goes_on_only_where_its_user_says_how(
    cluster: Cluster, say: Callable[..., str]
) -> None:
    say("cancel", "first")
    line = "rollout and actor agree to 0.9700 (Pearson), below 0.999, in step 2 (watch.gates.agreement: stop)"
    stopped = outcome.Outcome(1, 0, "1", 0, 4, 2, ends.GATE, outcome.STOP, "stopped by a gate", [line])
    cluster.run.segment(1).attempt(0).path.mkdir(parents=True, exist_ok=True)
    cluster.run.segment(1).cancel_file.unlink()
    outcome.save(stopped, cluster.run.segment(1))
    with pytest.raises(UserError, match=r"a gate stopped it: rollout and actor agree to 0\.97.*gates[ =]warn"):
        Resumption(cluster.run, cluster.slurm).submit(print)
    asked = Asked([Override("watch.gates.mode", "warn", "GATES")])
    assert Resumption(cluster.run, cluster.slurm, asked=asked).submit(print)
    assert json.loads(cluster.run.node_spec_file.read_text())["gates"]["mode"] == "warn"
