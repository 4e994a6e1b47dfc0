"""Submitting, with stand-ins for Slurm's commands: whatever goes wrong on the way, nothing is left in the queue."""

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from file_queue import Cluster

from dsv4kit.config.loading import Override
from dsv4kit.errors import UserError
from dsv4kit.launch.cancel import cancel_run
from dsv4kit.launch.chain import JobsLeftError
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.state import read_state
from dsv4kit.run import ends, outcome
from dsv4kit.run.directory import RunDir
from dsv4kit.run.errors import DamagedFileError
from dsv4kit.run.files import write_json


def test_the_chain_is_submitted_and_recorded(cluster: Cluster) -> None:
    cluster.submit()
    assert cluster.jobs == ["1", "2", "3"]
    assert [(link.segment, link.job_id) for link in cluster.run.chain()] == [(1, "1"), (2, "2"), (3, "3")]
    assert "--dependency=singleton,afterany:2" in (cluster.root / "calls").read_text()


def test_options_for_slurms_clients_in_the_callers_shell_reach_no_client(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one of these, squeue hides the running segment and scancel cancels nothing and says nothing."""
    lines = (Path(__file__).parents[1] / "data" / "slurm_variables.txt").read_text().splitlines()
    names = {line.split()[1] for line in lines if not line.startswith("#")}
    for name in names:
        monkeypatch.setenv(name, "else")
    monkeypatch.setenv("SLURM_JWT", "a token")
    slurm = Slurm({"SLURM_CONF": "/etc/slurm/slurm.conf"})
    for seen in (slurm.run("env"), subprocess.run(slurm.command("env"), capture_output=True, text=True).stdout):
        assert [line for line in seen.splitlines() if line.endswith("=else")] == []
        assert {"SLURM_JWT=a token", "SLURM_CONF=/etc/slurm/slurm.conf"} <= set(seen.splitlines())


def test_a_number_in_what_a_site_says_is_no_job(cluster: Cluster) -> None:
    """Once the first number of the output was taken: job 512 for every segment, and all of them started at once."""
    (cluster.root / "notice").write_text("this job costs 512 GPU-hours\n12|PENDING|(null)\n")
    cluster.submit()
    assert [link.job_id for link in cluster.run.chain()] == ["1", "2", "3"]
    assert read_state(cluster.run, cluster.slurm).state == "waiting"


@pytest.mark.parametrize(
    ("lie", "content", "said"),
    [
        ("said", "7;main\n", "sbatch named job 7, and there is no such job"),
        ("said", "this job costs 512 GPU-hours\n", "no job id in the last line of its output: 'this job costs 512"),
        ("said", "", "no job id in the last line of its output: ''"),
        ("silent", "", "sbatch named job 1, which is 'else' and not 'first-"),
        ("loose", "", r"job 2 does not wait for job 1, as sbatch was told: it waits for \(null\)"),
    ],
)
def test_a_job_that_is_not_what_sbatch_was_told_ends_the_submission(
    cluster: Cluster, lie: str, content: str, said: str
) -> None:
    (cluster.root / lie).write_text(content)
    with pytest.raises(UserError, match=said):
        cluster.submit()
    assert cluster.jobs == []
    assert not cluster.run.path.exists()


def test_an_answer_of_another_form_is_one_clear_line(cluster: Cluster) -> None:
    cluster.submit()
    (cluster.root / "notice").write_text("dsv4kit|12\n")
    for ask in (lambda: cluster.slurm.states(["1"]), lambda: cluster.slurm.node_count(None), cluster.slurm.unfinished):
        with pytest.raises(UserError, match=r"'dsv4kit\|12' is not the answer that was asked for"):
            ask()


def test_the_callers_environment_reaches_sbatch_and_not_the_job(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cluster.root / "bin" / "sbatch").write_text(
        f'#!/bin/bash\nenv > "{cluster.root}/seen"; for word; do case $word in --export-file=*)'
        f' cp "${{word#*=}}" "{cluster.root}/job.env" ;; esac; done; exit 1\n'
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/slurm/lib")
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    monkeypatch.setenv("SBATCH_QOS", "else")
    monkeypatch.setenv("SLURM_JWT", "t0ken")
    submission = cluster.submission()
    slurm = Slurm({"PATH": f"{cluster.root / 'bin'}:/usr/bin:/bin"})
    with pytest.raises(UserError, match="sbatch refused segment 1"):
        dataclasses.replace(submission, slurm=slurm).submit(lambda line: None)
    seen = (cluster.root / "seen").read_text().splitlines()
    assert {"LD_LIBRARY_PATH=/opt/slurm/lib", "WANDB_API_KEY=s3cr3t", "SLURM_JWT=t0ken"} <= set(seen)
    assert "SBATCH_QOS=else" not in seen
    job = (cluster.root / "job.env").read_text().split("\0")
    assert f"PATH={cluster.root / 'bin'}:/usr/bin:/bin" in job
    assert [line for line in job if line.startswith(("LD_", "WANDB", "SBATCH"))] == []
    assert not any("t0ken" in word or "s3cr3t" in word for word in slurm.command("sbatch"))


def test_what_is_left_after_a_cancel_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.submit()
    (cluster.root / "deaf").touch()
    assert cancel_run(cluster.run, cluster.slurm, patience_s=0) == (3, dict.fromkeys("123", "PENDING"))


def test_when_sbatch_refuses_one_the_others_are_cancelled_and_nothing_is_left(cluster: Cluster) -> None:
    (cluster.root / "refuse").write_text("3")
    reasons = ["sbatch: error: QOSMaxSubmitJobPerUserLimit", "sbatch: error: Batch job submission failed: policy"]
    (cluster.root / "reasons").write_text("\n".join(["Have a nice day", *reasons]))
    with pytest.raises(UserError, match=f"sbatch refused segment 3: {'; '.join(reasons)}"):
        cluster.submit()
    assert cluster.jobs == []
    assert not cluster.run.path.exists()


@pytest.mark.parametrize(
    "line",
    [
        "AssocMaxSubmitJobLimit",
        "QOSMaxSubmitJobPerUserLimit",
        "AssocGrpSubmitJobsLimit",
        "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and so on)",
        "Batch job submission failed: Slurm temporarily unable to accept job, sleeping and retrying",
    ],
)
def test_a_limit_on_submitted_jobs_names_chain(cluster: Cluster, line: str) -> None:
    (cluster.root / "refuse").write_text("3")
    (cluster.root / "reasons").write_text(f"sbatch: error: {line}")
    with pytest.raises(UserError, match=r"CHAIN=2 keeps no more than 2 of them in the queue; each segment submits the"):
        cluster.submit()
    assert (cluster.jobs, cluster.run.path.exists()) == ([], False)


def test_a_limited_chain_has_all_it_needs_written_and_so_many_jobs_in_the_queue(
    cluster: Cluster, say: Callable[..., str]
) -> None:
    said = say("resume", "first", "--chain=2")
    assert "is waiting" in said
    say("cancel", "first")
    said = say("resume", "first", "--chain=2", "--steps=16", "--spare-segments=1", "--no-follow")
    assert "changed: site.slurm.chain: None -> 2" in said
    assert said.endswith("3 more are submitted by the segments before them: no more than 2 are in the queue\n")
    assert cluster.jobs == ["4", "5"]
    for number in range(4, 9):
        segment = cluster.run.segment(number)
        assert all(path.exists() for path in (segment.script, segment.job_environment, segment.payload))
        assert '"$segment_dir" "$job_name" 8 2 "$@"' in segment.script.read_text()
        assert segment.submit_next_script.exists()
        assert not segment.submitting_file.exists()
    assert [link.job_id for link in cluster.run.chain()[3:]] == ["4", "5", "", "", ""]
    cluster.run.segment(6).not_submitted_file.write_text("sbatch: error: busy\n")
    state = read_state(cluster.run, cluster.slurm)
    assert (state.state, state.segments[5].state) == ("waiting", "NOT SUBMITTED")
    assert "segment 6: note: not submitted yet: sbatch: error: busy" in say("status", "first")
    for job in cluster.jobs:
        (cluster.root / "jobs" / job).unlink()
    state = read_state(cluster.run, cluster.slurm)
    assert state.reason == "step 0 of 16 is saved; 2 segments were never submitted: sbatch: error: busy"
    assert "0 run first: goes on" in say("resume", "first", "--no-follow")
    for words in (["--chain=1"], ["--chain=x"]):
        assert say("resume", "first", *words).startswith(f"2 dsv4kit: CHAIN={words[0][8:]}: chain=")


def test_an_interruption_in_the_middle_leaves_nothing_either(cluster: Cluster) -> None:
    def interrupt(line: str) -> None:
        if "segment 2" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.submit(interrupt)
    assert cluster.jobs == []
    assert not cluster.run.path.exists()


def test_nobody_listening_is_no_reason_to_stop_halfway(cluster: Cluster) -> None:
    def closed(line: str) -> None:
        raise BrokenPipeError

    cluster.submit(closed)
    assert cluster.jobs == ["1", "2", "3"]


def test_jobs_that_cannot_be_cancelled_keep_their_run_directory(cluster: Cluster) -> None:
    def fail(line: str) -> None:
        (cluster.root / "down").touch()
        raise KeyboardInterrupt

    with pytest.raises(JobsLeftError, match="may be left in the queue"):
        cluster.submit(fail)
    assert cluster.run.path.exists()


def test_a_run_submitted_by_somebody_else_in_between_is_not_overwritten(cluster: Cluster) -> None:
    submission = cluster.submission()
    submission.check()
    (cluster.run.path / "kit").mkdir(parents=True)
    with pytest.raises(UserError, match="exists already"):
        submission.submit(lambda line: None)
    assert [path.name for path in cluster.run.path.parent.iterdir()] == ["first"]


def test_more_segments_than_a_queue_takes_are_refused(cluster: Cluster) -> None:
    with pytest.raises(UserError, match="at most 1000 jobs"):
        cluster.submission(Override("schedule.steps", 999_999, "STEPS")).check()


def test_a_damaged_chain_is_never_taken_for_an_empty_one(cluster: Cluster) -> None:
    cluster.submit()
    for damage in ("", "{", "[]", "5", '{"segments": null}', '{"segments": [{"segment": 1}]}'):
        (cluster.run.path / "chain.json").write_text(damage)
        with pytest.raises(DamagedFileError, match=r"chain\.json: missing or damaged"):
            read_state(cluster.run, cluster.slurm)
    (cluster.run.path / "chain.json").unlink()
    with pytest.raises(DamagedFileError, match=r"chain\.json: missing or damaged"):
        cluster.run.chain()


def test_a_slurm_that_does_not_answer_makes_no_run_over(cluster: Cluster) -> None:
    cluster.submit()
    (cluster.root / "down").touch()
    state = read_state(cluster.run, cluster.slurm)
    assert (state.state, state.over) == ("unknown", False)


def test_cancel_ends_what_is_in_the_queue_whatever_the_files_say(cluster: Cluster, say: Callable[..., str]) -> None:
    (cluster.run.path / "chain.json").write_text("{")
    (cluster.run.path / "node.json").unlink()
    assert say("cancel", "first") == "0 run first: cancelled 3 segments\n"
    assert cluster.jobs == []
    assert say("cancel", "first") == "0 run first: there is nothing left to cancel\n"


def test_logs_have_colours_on_a_terminal_only(cluster: Cluster, say: Callable[..., str]) -> None:
    log = cluster.run.segment(1).path / "attempt-0" / "driver.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"\x1b[36m(WorkerDict pid=7)\x1b[0m loss 1.0\r\nend")
    assert say("logs", "first") == f"0 # {log}\n(WorkerDict pid=7) loss 1.0\r\nend"


def test_a_cancelled_run_says_so_and_not_that_it_failed(cluster: Cluster, say: Callable[..., str]) -> None:
    write_json(cluster.run.segment(1).path / "attempt-0" / "plan.json", {"start": 0, "target": 4})
    say("cancel", "first")
    ended = outcome.Outcome(1, 0, "1", 0, 4, reached=0, end=ends.TERMINATED, next="stop", reason="2 attempts")
    outcome.save(ended, cluster.run.segment(1))
    state = read_state(cluster.run, cluster.slurm)
    assert (state.state, state.segments[0].end) == ("cancelled", "cancelled")
    assert state.reason == "by the user; step 0 of 12 is saved"
    assert "first: cancelled, 0 of 12 steps saved" in say("status", "first")
    said = say("resume", "first", "--no-follow")
    assert said.startswith("0 run first: goes on from step 0 of 12, segments 1 to 3 are over\nsegment 4: job ")
    assert read_state(cluster.run, cluster.slurm).state == "waiting"
    assert outcome.history(cluster.run)[0].end == "cancelled"


def test_a_run_goes_by_the_name_its_jobs_have_whichever_way_its_path_is_written(
    cluster: Cluster, say: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has a hash of the path in it; by another path, three live jobs were nothing left to cancel."""
    link = cluster.root / "a link"
    link.symlink_to(cluster.run.path.parent)
    for way in (link, cluster.root / "bin" / ".." / "runs"):
        monkeypatch.setenv("DSV4KIT_RUNS", str(way))
        assert RunDir(way / "first").job_name == cluster.run.job_name
        assert "is waiting" in say("resume", "first")
        assert say("cancel", "first") == "0 run first: cancelled 3 segments\n"
        assert f"first: cancelled, 0 of 12 steps saved\n{cluster.run.path}\n" in say("status", "first")
        said = say("resume", "first", "--no-follow")
        assert said.startswith("0 run first: goes on")
        last = cluster.run.chain()[-1].segment
        script = cluster.run.segment(last).script.read_text()
        assert f"#SBATCH --job-name={cluster.run.job_name}\n" in script


def test_one_segment_is_one(cluster: Cluster, say: Callable[..., str]) -> None:
    for job in cluster.jobs[1:]:
        (cluster.root / "jobs" / job).unlink()
    assert say("cancel", "first") == "0 run first: cancelled 1 segment\n"


def test_a_cancel_that_slurm_refuses_marks_nothing(cluster: Cluster, say: Callable[..., str]) -> None:
    (cluster.root / "stuck").touch()
    assert say("cancel", "first").startswith("2 dsv4kit: scancel failed")
    assert read_state(cluster.run, cluster.slurm).state == "waiting"
    assert not any(segment.cancel_file.exists() for segment in cluster.run.segments())


def test_a_finished_run_is_extended_by_its_length(cluster: Cluster, say: Callable[..., str]) -> None:
    say("cancel", "first")
    tracker = cluster.run.path / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(exist_ok=True)
    tracker.write_text("12")
    assert say("resume", "first") == "2 dsv4kit: RUN=first: finished, all 12 steps are saved; STEPS=N extends it\n"
    assert "STEPS=12: step 12 is saved already" in say("resume", "first", "--steps=12")


def test_an_empty_name_is_a_mistake_and_not_the_newest_run(cluster: Cluster, say: Callable[..., str]) -> None:
    assert say("cancel", "").startswith("2 dsv4kit: RUN=''")
    assert "another run" in say("cancel", "first", "--run=other")
    assert cluster.jobs == ["1", "2", "3"]


def test_a_run_that_may_still_go_on_is_not_resumed(cluster: Cluster, say: Callable[..., str]) -> None:
    assert "is waiting" in say("resume", "first")
    (cluster.root / "down").touch()
    assert "is not known: squeue failed" in say("resume", "first")
    assert cluster.jobs == ["1", "2", "3"]


@pytest.mark.parametrize("name", ["run.yaml", "node.json", "chain.json"])
def test_a_damaged_run_directory_is_one_line(cluster: Cluster, say: Callable[..., str], name: str) -> None:
    for content in ("", "{}", "[1]", "5", "{", "\x00\xff"):
        (cluster.run.path / name).write_text(content)
        for verb in ("status", "logs", "resume"):
            said = say(verb, "first")
            assert said.startswith("2 dsv4kit: ") or verb == "logs"
            assert said.count("\n") == 1


def test_leftovers_in_a_run_directory_do_no_harm(cluster: Cluster, say: Callable[..., str]) -> None:
    segment = cluster.run.segment(1).path
    (segment / "attempt-0").mkdir()
    (segment / "attempt-0.bak").mkdir()
    (segment / "attempt-1").touch()
    (segment / "attempt-0" / "metrics.jsonl").mkdir()
    (segment / "attempt-0" / "plan.json").write_text("[1]")
    (segment / "attempt-0" / "outcome.json").write_text("{}")
    (segment / "attempt-0" / "phases.jsonl").write_text('5\n{}\n{"phase": "a", "time": "x"}\n' + "[" * 5000)
    (segment.parent / "0001.bak").mkdir()
    assert json.loads(say("status", "first", "--json").removeprefix("0 "))["state"] == "waiting"


def test_a_defect_of_the_kit_is_one_line_too(say: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("never\nseen")

    monkeypatch.setattr("dsv4kit.cli.runs.open_run", fail)
    what = "RuntimeError: never\\nseen (DSV4KIT_TRACEBACK=1 shows where)"
    assert say("status") == f"1 dsv4kit: a defect of dsv4kit, please report it: {what}\n"
