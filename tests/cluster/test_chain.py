"""Chains of segments on a real Slurm with a real Ray; a stand-in trainer takes seconds where verl takes minutes."""

import copy
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv4kit.config.loading import Override, load_settings, load_site
from dsv4kit.config.site import Site
from dsv4kit.errors import UserError
from dsv4kit.launch import doctor
from dsv4kit.launch.branch import Branch
from dsv4kit.launch.cancel import cancel_run
from dsv4kit.launch.changes import Asked
from dsv4kit.launch.resume import Resumption
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.state import RunState, read_state
from dsv4kit.launch.submission import Submission
from dsv4kit.run import ends
from dsv4kit.run.directory import RunDir
from dsv4kit.sandbox.cluster import Sandbox
from dsv4kit.sandbox.runtime import runtime_python

STAND_IN = Path(__file__).parents[1] / "stand_in"


class Cluster:
    """Submits runs of the stand-in trainer to the sandbox and waits for what they do."""

    def __init__(self, sandbox: Sandbox, root: Path, python: Path) -> None:
        sandbox.share([root, python.parents[1], STAND_IN])
        self.sandbox, self.root, self.python = sandbox, root, python
        self.slurm = Slurm(sandbox.client_env)

    def submit(
        self,
        name: str,
        *changes: tuple[str, object],
        fault: str = "",
        nodes: int = 2,
        recipe: str = "grpo",
        site: Site | None = None,
    ) -> RunDir:
        submission = self.submission(name, *changes, fault=fault, nodes=nodes, recipe=recipe, site=site)
        submission.check()
        submission.check_cluster()
        submission.submit(print)
        return submission.run

    def submission(
        self,
        name: str,
        *changes: tuple[str, object],
        fault: str = "",
        nodes: int = 2,
        recipe: str = "grpo",
        site: Site | None = None,
    ) -> Submission:
        run = RunDir(self.root / name)
        settings = {
            "recipe.module": "stand_in_trainer",
            "env.PYTHONPATH": f"{run.kit}:{STAND_IN}",
            "env.STAND_IN_FAULT": fault,
            "hardware.min_memory_gib": 0.1,
            "schedule.nodes": nodes,
            "schedule.steps": 6,
            "schedule.segment_steps": 2,
            "schedule.save_freq": 1,
            "watch.restarts": 0,
            "schedule.spare_segments": 0,
            **dict(changes),
        }
        overrides = [Override(key, value, "test") for key, value in settings.items()]
        resolved = load_settings("cpu", "tiny", recipe, overrides)
        return Submission(resolved, site or load_site("sandbox"), run, self.slurm, str(self.python), "/m", "/d")

    def submit_sft(self, name: str, *changes: tuple[str, object], fault: str = "", nodes: int = 1) -> RunDir:
        """The same chain without Ray, where a test is about neither: a third of the time."""
        changes = (("recipe.module", "stand_in_sft"), *changes)
        return self.submit(name, *changes, fault=fault, nodes=nodes, recipe="sft")

    def wait(
        self, run: RunDir, until: Callable[[RunState], bool] = lambda state: state.over, limit_s: float = 400
    ) -> RunState:
        deadline = time.monotonic() + limit_s
        while not until(state := read_state(run, self.slurm)):
            assert time.monotonic() < deadline, json.dumps(state.as_dict(), indent=1)
            self._skip_requeue_hold()
            time.sleep(0.3)
        return state

    def nodes_of(self, job_id: str) -> str:
        return self.shown(job_id, "NodeList")

    def shown(self, job_id: str, key: str) -> str:
        """What Slurm shows of a job under a key: `StartTime`, `NodeList`."""
        words = self.slurm.run("scontrol", "show", "job", "-o", job_id).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{key}="))

    def _skip_requeue_hold(self) -> None:
        """Slurm holds a requeued job for two minutes; a test need not."""
        for line in self.slurm.run("squeue", "-h", "-o", "%i %r").splitlines():
            job_id, reason = line.split(maxsplit=1)
            if reason == "BeginTime":
                self.slurm.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")


@pytest.fixture(scope="module")
def cluster(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(sandbox, tmp_path_factory.mktemp("runs with a space, it's $HOME"), runtime_python())
    yield made
    made.slurm.run("scancel", "--me")


def steps(state: RunState) -> list[tuple[int | None, int | None]]:
    return [(segment.start_step, segment.end_step) for segment in state.segments]


def test_a_crash_costs_one_segment_the_next_goes_on_and_a_resume_makes_two_steps_more(cluster: Cluster) -> None:
    run = cluster.submit("whole", ("schedule.steps", 3), fault="crash@2", nodes=1)
    state = cluster.wait(run)
    assert state.state == "finished"
    assert steps(state) == [(0, 1), (1, 3)]
    assert [segment.end for segment in state.segments] == [ends.NETWORK, ends.COMPLETED]
    assert "NCCL error" in state.segments[0].evidence[0]
    assert sorted(state.rewards) == [1, 2, 3]
    assert {segment.state for segment in state.segments} == {"COMPLETED"}
    assert all(segment.seconds["bring-up"] > 0 for segment in state.segments)

    links = Resumption(run, cluster.slurm, steps=5).submit(print)
    assert [link.segment for link in links] == [3]
    state = cluster.wait(run)
    assert (state.state, state.saved_step) == ("finished", 5)
    assert steps(state)[-1] == (3, 5)

    attempt = run.segment(1).path / "attempt-0"
    sampled = {path.stem for path in (attempt / "nodes").glob("*.csv")}
    assert len(sampled) == 1
    assert not list(Path("/tmp").glob("ray-*"))


def test_a_run_that_makes_no_progress_stops_and_cancels_the_rest(cluster: Cluster) -> None:
    run = cluster.submit_sft("stuck", ("schedule.steps", 6), fault="oom@1!")
    state = cluster.wait(run)
    assert state.state == "stopped"
    assert "2 attempts in a row without progress" in state.reason
    assert [segment.end for segment in state.segments] == [ends.OUT_OF_GPU_MEMORY, ends.OUT_OF_GPU_MEMORY, None]
    assert [segment.state for segment in state.segments] == ["COMPLETED", "FAILED", "CANCELLED"]


def test_a_lost_tracker_is_rebuilt_and_a_broken_checkpoint_set_aside(cluster: Cluster) -> None:
    run = cluster.submit_sft("broken", ("schedule.steps", 4))
    cluster.wait(run)
    checkpoints = run.path / "checkpoints"
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("")
    shard = next((checkpoints / "global_step_4").glob("model_*"))
    shard.write_bytes(shard.read_bytes()[:-10])
    Resumption(run, cluster.slurm, steps=6).submit(print)
    state = cluster.wait(run)
    # Without a tracker as many segments were submitted as the whole run takes; the last finds nothing to do.
    assert steps(state)[2:4] == [(3, 5), (5, 6)]
    assert state.state == "finished"
    assert list((run.path / "quarantine").iterdir())
    notes = json.loads((run.segment(3).path / "attempt-0" / "outcome.json").read_text())["notes"]
    assert any("fell back from step 4 to step 3" in note for note in notes)


def test_a_killed_submission_leaves_a_run_that_goes_on_as_far_as_it_can(cluster: Cluster) -> None:
    """The job that no file knew of failed after a minute without its payload, and `resume` could not read the run."""

    class Killed(Slurm):
        def confirm(self, job_id: str, job_name: str, after: str | None) -> None:
            if after:
                os.kill(os.getpid(), signal.SIGKILL)
            super().confirm(job_id, job_name, after)

    gate = cluster.root / "killed-gate"
    changes = [("recipe.module", "stand_in_sft"), ("env.STAND_IN_GATE", f"1:{gate}"), ("schedule.segment_steps", 1)]
    changes += [("schedule.steps", 3), ("schedule.spare_segments", 1)]
    submission = cluster.submission("killed", *changes, nodes=1, recipe="sft")
    run = submission.run
    if (child := os.fork()) == 0:
        dataclasses.replace(submission, slurm=Killed(cluster.sandbox.client_env)).submit(lambda line: None)
        os._exit(0)
    os.waitpid(child, 0)
    state = read_state(run, cluster.slurm)
    assert [bool(segment.job_id) for segment in state.segments] == [True, False, False, False]
    assert len(state.other_jobs) == 1
    with pytest.raises(UserError, match="has jobs in the queue"):
        Resumption(run, cluster.slurm).submit(print)
    gate.touch()
    state = cluster.wait(run)
    assert (state.state, state.reason) == ("incomplete", "step 2 of 3 is saved; 1 segment was never submitted")
    assert steps(state) == [(0, 1), (1, 2), (None, None)]
    Resumption(run, cluster.slurm).submit(print)
    state = cluster.wait(run)
    assert (state.state, steps(state)[-1]) == ("finished", (2, 3))
    assert cluster.slurm.live(run.job_name) == {}


def test_on_a_full_disk_nothing_is_submitted_and_nothing_is_left(cluster: Cluster, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small], check=True)
    before = cluster.slurm.run("squeue", "-h")
    try:
        full = copy.copy(cluster)
        full.root = small
        with pytest.raises(OSError, match="No space left on device") as error:
            full.submit("r")
        assert str(error.value.filename2).startswith(str(small))
        assert list(small.iterdir()) == []
        assert cluster.slurm.run("squeue", "-h") == before
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


def test_a_disk_that_fills_while_it_trains_holds_the_rest_of_the_chain(cluster: Cluster, small_disk: Path) -> None:
    """Three segments were used up in 8 s, without a word about why."""
    gate, fillers = cluster.root / "full-gate", [small_disk / "filler", small_disk / "rest"]
    on_it = copy.copy(cluster)
    on_it.root = small_disk
    run = on_it.submit_sft("r", ("schedule.steps", 4), ("env.STAND_IN_GATE", f"2:{gate}"))
    cluster.wait(run, lambda state: state.saved_step == 1)
    for filler in fillers:  # until nothing more can be written, be it a single byte
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4096"], check=False, capture_output=True)
    gate.touch()
    state = cluster.wait(run, lambda state: state.segments[0].over and "held" in state.reason)
    assert state.state == "waiting"
    assert f"held by segment 1: nothing can be written to {run.path}" in state.reason
    first, *others = [segment.state for segment in state.segments]
    assert (first, set(others)) == ("FAILED", {"PENDING"})
    for filler in fillers:
        filler.unlink()
    cancel_run(run, cluster.slurm)
    cluster.wait(run)
    Resumption(run, cluster.slurm).submit(print)
    state = cluster.wait(run)
    assert (state.state, state.saved_step) == ("finished", 4)


def test_limits_of_the_submitting_shell_do_not_reach_the_job(cluster: Cluster, tmp_path: Path) -> None:
    """`ulimit -t 6` killed two drivers in a row; the preflight would refuse such limits now."""
    sbatch = tmp_path / "sbatch"
    limited = "ulimit -S -t 6 -n 256 -l 64"
    sbatch.write_text(f'#!/bin/bash\n{limited}\nexec {shutil.which("sbatch")} "$@"\n')
    sbatch.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    shell = copy.copy(cluster)
    shell.slurm = Slurm({**cluster.sandbox.client_env, "PATH": path})
    run = shell.submit_sft("limits", ("schedule.steps", 1))
    assert cluster.wait(run).state == "finished"


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(cluster: Cluster) -> None:
    run = cluster.submit_sft("gone", ("schedule.steps", 2))
    cluster.wait(run)
    for step in (run.path / "checkpoints").glob("global_step_*"):
        subprocess.run(["rm", "-r", step], check=True)
    Resumption(run, cluster.slurm, steps=4).submit(print)
    state = cluster.wait(run)
    assert state.state == "stopped"
    assert state.segments[-1].end == ends.CHECKPOINT
    assert "not starting over" in state.segments[-1].evidence[0]


# What would hide the running segment, or have a client answer in another form.
_HOSTILE = {"SLURM_TIME_FORMAT": "%s", "SBATCH_TIMELIMIT": "1", "SQUEUE_FORMAT": "%i", "SINFO_FORMAT": "%P"}


def test_no_variable_of_slurms_clients_changes_what_a_verb_does(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SQUEUE_PARTITION set, `resume` started a second chain beside the first, and `cancel` cancelled nothing."""
    lines = (Path(__file__).parents[1] / "data" / "slurm_variables.txt").read_text().splitlines()
    names = {name: client for client, name in (line.split() for line in lines if not line.startswith("#"))}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setenv(name, _HOSTILE.get(name, "else"))
        steered = copy.copy(cluster)
        steered.slurm = Slurm(cluster.sandbox.client_env)
        run = steered.submit_sft("steered", ("env.STAND_IN_STEP_S", "60"))
        steered.wait(run, until=lambda state: state.state == "running")
        jobs = cluster.slurm.live(run.job_name)
        assert len(jobs) == 3
        assert cluster.shown(next(iter(jobs)), "TimeLimit") == "00:30:00"
        submission = steered.submission("never")
        assert [finding.level for finding in doctor.accepted(submission)] == ["ok"]

    nodes = cluster.slurm.node_count(None)
    for name, client in names.items():
        if client in ("squeue", "scancel", "sinfo"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(name, _HOSTILE.get(name, "else"))
                slurm = Slurm(cluster.sandbox.client_env)
                assert slurm.live(run.job_name) == jobs, name
                assert slurm.node_count(None) == nodes, name
                with pytest.raises(UserError, match="is running"):
                    Resumption(run, slurm).submit(print)

    for name in names:
        monkeypatch.setenv(name, _HOSTILE.get(name, "else"))
    assert cancel_run(run, Slurm(cluster.sandbox.client_env)) == (3, {})
    assert cluster.slurm.live(run.job_name) == {}


def test_a_resume_with_other_settings_and_the_new_kit_goes_on_where_the_run_was(cluster: Cluster) -> None:
    run = cluster.submit_sft("changed", ("schedule.steps", 2))
    cluster.wait(run)
    (run.kit / "dsv4kit" / "node" / "agent.py").write_text("raise SystemExit('an older kit')")
    node = cluster.nodes_of(run.chain()[0].job_id)
    assert (run.path / "checkpoints" / "global_step_1").exists()
    overrides = [
        Override("schedule.time", "0:07:00", "TIME=0:07:00"),
        Override("schedule.save_freq", 2, "SAVE_FREQ=2"),
        Override("checkpoint.keep_last", 1, "KEEP_LAST=1"),
    ]
    asked = Asked(overrides, queue={"PARTITION": "main", "EXCLUDE": node}, new_kit=True)
    links = Resumption(run, cluster.slurm, steps=4, asked=asked).submit(print)
    state = cluster.wait(run)
    assert (state.state, steps(state)) == ("finished", [(0, 2), (2, 4)])
    left = sorted(path.name for path in (run.path / "checkpoints").glob("global_step_*"))
    assert left == ["global_step_2", "global_step_4"]
    assert cluster.shown(links[0].job_id, "TimeLimit") == "00:07:00"
    assert cluster.nodes_of(links[0].job_id) != node
    assert state.segments[-1].changes["site.slurm.exclude"] == [None, node]


def test_no_more_than_two_segments_are_in_the_queue_and_each_submits_the_next(cluster: Cluster) -> None:
    site = load_site("sandbox")
    site = site.model_copy(update={"slurm": site.slurm.model_copy(update={"chain": 2})})
    gate = cluster.root / "limited-gate"
    changes = [("schedule.steps", 3), ("schedule.segment_steps", 1), ("env.STAND_IN_GATE", f"2:{gate}")]
    changes += [("recipe.module", "stand_in_sft"), ("schedule.spare_segments", 1)]
    run = cluster.submit("limited", *changes, nodes=1, recipe="sft", site=site)
    jobs = cluster.slurm.live(run.job_name)
    assert len(jobs) <= 2
    state = cluster.wait(run, lambda state: state.segments[2].job_id != "")
    assert len(cluster.slurm.live(run.job_name)) == 2
    assert [bool(segment.job_id) for segment in state.segments] == [True, True, True, False]
    waits = cluster.shown(state.segments[2].job_id, "Dependency")
    assert f"afterany:{state.segments[1].job_id}" in waits
    assert "singleton" in waits
    gate.touch()
    state = cluster.wait(run)
    assert (state.state, steps(state)) == ("finished", [(0, 1), (1, 2), (2, 3)])
    assert len({segment.job_id for segment in state.segments}) == 3
    assert cluster.slurm.live(run.job_name) == {}


def test_a_limited_chain_that_is_cancelled_submits_nothing_more(cluster: Cluster) -> None:
    site = load_site("sandbox")
    site = site.model_copy(update={"slurm": site.slurm.model_copy(update={"chain": 2})})
    changes = [("recipe.module", "stand_in_sft"), ("env.STAND_IN_STEP_S", "60"), ("schedule.segment_steps", 1)]
    run = cluster.submit("limited-cancelled", *changes, nodes=1, recipe="sft", site=site)
    cluster.wait(run, lambda state: state.state == "running")
    assert cancel_run(run, cluster.slurm) == (2, {})
    state = cluster.wait(run)
    assert state.state == "cancelled"
    deadline = time.monotonic() + 30
    while (first := cluster.shown(state.segments[0].job_id, "JobState")) == "COMPLETING":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert first == "CANCELLED"
    assert cluster.slurm.live(run.job_name) == {}
    assert [bool(segment.job_id) for segment in state.segments[:3]] == [True, True, False]


def test_a_branch_goes_on_from_a_step_of_another_run_and_leaves_that_one_alone(cluster: Cluster) -> None:
    parent = cluster.submit_sft("parent", ("schedule.steps", 2))
    assert cluster.wait(parent).state == "finished"
    before = {path: path.stat().st_mtime_ns for path in parent.path.rglob("*") if path.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4KIT_RUNS", str(cluster.root))
        branch = Branch.named("parent@1")
    resolved = branch.settings({}, [Override("schedule.steps", 3, "STEPS=3")])
    submission = cluster.submission("child", nodes=1, recipe="sft")
    submission = dataclasses.replace(submission, resolved=resolved, first_step=1, branch=branch)
    submission.check()
    submission.submit(print)
    state = cluster.wait(submission.run)
    assert (state.state, steps(state), sorted(state.losses)) == ("finished", [(1, 3)], [2, 3])
    assert {path: path.stat().st_mtime_ns for path in parent.path.rglob("*") if path.is_file()} == before
