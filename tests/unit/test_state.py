"""What `status` and `submit` show, from a run directory and what Slurm says."""

import json
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from dsv4kit.cli.follow import progress_lines, summary
from dsv4kit.cli.status import table
from dsv4kit.errors import UserError
from dsv4kit.launch.run_dir import checked_name, find_run
from dsv4kit.launch.slurm import JobState, Slurm
from dsv4kit.launch.state import read_state
from dsv4kit.run import ends, outcome, phases
from dsv4kit.run.directory import ChainLink, RunDir
from dsv4kit.run.files import append_json, write_json, write_text


class Queue(Slurm):
    """A queue that holds what a test puts into it."""

    def __init__(self, **jobs: str) -> None:
        super().__init__()
        self.jobs = {job_id.removeprefix("j"): JobState(state, "") for job_id, state in jobs.items()}

    def states(self, job_ids: Iterable[str], job_name: str | None = None) -> dict[str, JobState]:
        return {job_id: self.jobs[job_id] for job_id in job_ids if job_id in self.jobs}


class Unreachable(Slurm):
    def states(self, job_ids: Iterable[str], job_name: str | None = None) -> dict[str, JobState]:
        raise UserError("Slurm is not reachable")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of 12 steps in three segments, of which the first has made steps 1 to 4 and the second is at step 6."""
    run = RunDir(tmp_path / "first")
    write_json(run.path / "node.json", {"checkpoint_dir": str(run.path / "checkpoints"), "total_steps": 12})
    write_text(run.path / "run.yaml", "run: first\n")
    run.save_chain([ChainLink(1, "11"), ChainLink(2, "12"), ChainLink(3, "13")])
    attempt(run, 1, start=0, target=4, steps=range(1, 5))
    save(run, 1, start=0, reached=4)
    attempt(run, 2, start=4, target=8, steps=range(5, 7))
    write_text(run.path / "checkpoints" / "latest_checkpointed_iteration.txt", "4")
    return run


def attempt(run: RunDir, segment: int, start: int, target: int, steps: Iterable[int], number: int = 0) -> None:
    directory = run.segment(segment).attempt(number).path
    write_json(directory / "plan.json", {"start": start, "target": target})
    for phase, at in [("bring-up", 10.0), ("import", 17.0), ("steps", 90.0)]:
        append_json(directory / "phases.jsonl", {"phase": phase, "time": at})
    for step in steps:
        append_json(directory / "metrics.jsonl", {"step": step, "data": {"critic/score/mean": step / 10}})


def save(run: RunDir, segment: int, start: int, reached: int, **changes: object) -> None:
    fields = {
        "attempt": 0,
        "job_id": "1",
        "target": reached,
        "end": ends.COMPLETED,
        "next": "continue",
        "reason": "",
    }
    made = outcome.Outcome(segment=segment, start=start, reached=reached, ended=100.0, **{**fields, **changes})  # type: ignore[arg-type]
    outcome.save(made, run.segment(segment))


def test_a_run_on_its_way(run: RunDir) -> None:
    state = read_state(run, Queue(j11="COMPLETED", j12="RUNNING", j13="PENDING"))
    assert (state.state, state.saved_step, state.total_steps) == ("running", 4, 12)
    assert state.last_reward == pytest.approx(0.6)
    first, second, third = state.segments
    assert (first.start_step, first.end_step, first.end) == (0, 4, "completed")
    assert first.seconds == {"bring-up": 7.0, "import": 73.0, "steps": 10.0}
    assert (second.start_step, second.end_step, second.last_step) == (4, None, 6)
    assert (second.phase, first.phase, third.phase) == ("steps", None, None)
    assert second.phase_s is not None
    assert "bring-up 7, import 73, now steps " in table(state)
    assert (third.attempts, third.start_step) == (0, None)


def test_a_step_made_twice_counts_by_its_later_attempt(run: RunDir) -> None:
    attempt(run, 2, start=4, target=8, steps=[], number=1)
    append_json(run.segment(2).path / "attempt-1" / "metrics.jsonl", {"step": 5, "data": {"critic/score/mean": 0.99}})
    assert read_state(run, Queue()).rewards[5] == 0.99


def test_all_steps_saved_is_finished(run: RunDir) -> None:
    write_text(run.path / "checkpoints" / "latest_checkpointed_iteration.txt", "12")
    assert read_state(run, Queue(j11="COMPLETED", j12="COMPLETED", j13="COMPLETED")).state == "finished"


def test_a_finished_run_that_is_to_go_back_is_not_finished(run: RunDir) -> None:
    write_text(run.path / "checkpoints" / "latest_checkpointed_iteration.txt", "12")
    queue = Queue(j11="COMPLETED", j12="COMPLETED", j13="PENDING")
    assert read_state(run, queue).state == "finished"
    write_json(run.segment(3).path / "request.json", {"from_step": 4, "allow_restart": False})
    state = read_state(run, queue)
    assert (state.state, state.over) == ("waiting", False)
    assert read_state(run, Queue(j11="COMPLETED", j12="COMPLETED", j13="CANCELLED")).state == "finished"


def test_a_chain_used_up_is_incomplete_and_says_what_to_do(run: RunDir) -> None:
    state = read_state(run, Queue(j11="COMPLETED", j12="FAILED", j13="FAILED"))
    assert state.state == "incomplete"
    assert state.reason == "step 4 of 12 is saved and no segment is left"
    assert "`dsv4kit resume --run first` goes on" in table(state)


def test_a_chain_that_stopped_itself_says_why(run: RunDir) -> None:
    save(run, 2, start=4, reached=4, next="stop", reason="2 attempts in a row without progress", evidence=["CUDA"])
    state = read_state(run, Queue(j11="COMPLETED", j12="FAILED", j13="CANCELLED"))
    assert (state.state, state.reason) == ("stopped", "2 attempts in a row without progress")
    assert "segment 2: CUDA" in table(state)


def test_jobs_slurm_has_forgotten_are_told_from_what_they_left(run: RunDir) -> None:
    states = [segment.state for segment in read_state(run, Queue()).segments]
    assert states == ["COMPLETED", "CANCELLED", "CANCELLED"]


def test_a_segment_that_started_nothing_says_why_also_when_slurm_has_forgotten_it(run: RunDir) -> None:
    """The secrets file had another mode by then; the run was shown as incomplete, without a reason."""
    said = "/home/me/keys: not a file of your own with mode 0600 or 0400; nothing is started"
    run.save_chain([ChainLink(1, "11"), ChainLink(3, "13"), ChainLink(4, "14")])
    write_text(run.segment(3).log, f"module load something\nsegment 3: {said}\n")
    for queue in (Queue(j11="COMPLETED", j13="FAILED", j14="CANCELLED"), Queue(j11="COMPLETED", j14="CANCELLED")):
        state = read_state(run, queue)
        assert (state.state, state.reason) == ("stopped", said)
        assert (state.segments[1].state, state.segments[1].evidence) == ("FAILED", [said])
        assert f"segment 3: {said}" in table(state)
    run.save_chain([ChainLink(1, "11"), ChainLink(3, "13"), ChainLink(4, "14"), ChainLink(5, "15")])
    resumed = Queue(j11="COMPLETED", j13="FAILED", j14="CANCELLED", j15="COMPLETED")
    assert read_state(run, resumed).state == "incomplete"


def test_without_slurm_the_directory_still_tells_the_steps(run: RunDir) -> None:
    state = read_state(run, Unreachable())
    assert (state.state, state.reason, state.saved_step) == ("unknown", "Slurm is not reachable", 4)
    assert progress_lines(state)[-1] == "waiting for Slurm to answer: Slurm is not reachable"


def test_the_table_and_the_json_say_the_same(run: RunDir) -> None:
    state = read_state(run, Queue(j11="COMPLETED", j12="RUNNING", j13="PENDING"))
    text = table(state)
    assert "first: running, 4 of 12 steps saved, last reward 0.600" in text
    assert "0-4 of 4" in text
    assert "bring-up 7, import 73, steps 10" in text
    assert json.loads(json.dumps(state.as_dict()))["segments"][0]["end_step"] == 4


def test_progress_is_told_once_per_change(run: RunDir) -> None:
    state = read_state(run, Queue(j11="COMPLETED", j12="RUNNING", j13="PENDING"))
    lines = progress_lines(state)
    assert "step 4/12: reward 0.400" in lines
    assert "step 6/12: reward 0.600" in lines
    assert "segment 1: completed, steps 0 to 4 saved" in lines
    assert lines.index("step 4/12: reward 0.400") < lines.index("step 5/12: reward 0.500")
    assert "mean reward 0.100 in the first step, 0.600 in the last step" in summary(state)


def test_a_run_that_goes_on_shows_only_its_new_segments(run: RunDir) -> None:
    state = read_state(run, Queue(j11="COMPLETED", j12="RUNNING", j13="PENDING"))
    lines = progress_lines(state, first=2)
    assert not any("segment 1" in line or "step 4/12" in line for line in lines)
    assert "step 5/12: reward 0.500" in lines


def test_the_quiet_phase_says_how_to_look_inside(run: RunDir) -> None:
    append_json(run.segment(2).path / "attempt-0" / "phases.jsonl", {"phase": "import", "time": 95.0})
    state = read_state(run, Queue(j11="COMPLETED", j12="RUNNING", j13="PENDING"))
    assert any("`dsv4kit logs --run first --follow`" in line for line in progress_lines(state))


def test_the_last_line_of_a_run_that_stopped_names_what_comes_next(run: RunDir) -> None:
    save(run, 2, start=4, reached=4, next="stop", reason="2 attempts in a row without progress")
    last = summary(read_state(run, Queue(j11="COMPLETED", j12="FAILED", j13="CANCELLED")))
    assert last.endswith("`dsv4kit logs --run first --segment 2` shows its log, `dsv4kit resume --run first` goes on")
    write_text(run.path / "checkpoints" / "latest_checkpointed_iteration.txt", "12")
    assert "`" not in summary(read_state(run, Queue()))


def test_names_of_runs_are_safe_everywhere() -> None:
    assert checked_name("a.B_c-1") == "a.B_c-1"
    for name in ("", ".", "..", "-x", "a/b", "a b", "a\n", "é", "x" * 64, "$(id)", "`id`", "a;b"):
        with pytest.raises(UserError, match="a run's name has"):
            checked_name(name)


def test_two_runs_of_one_name_have_different_job_names(tmp_path: Path) -> None:
    assert RunDir(tmp_path / "a" / "x").job_name != RunDir(tmp_path / "b" / "x").job_name


def test_the_newest_run_is_meant_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path))
    for age, name in enumerate(["old", "new"]):
        write_text(tmp_path / name / "run.yaml", "run: x\n")
        os.utime(tmp_path / name / "run.yaml", (1000 + age, 1000 + age))
    assert find_run(None).name == "new"
    with pytest.raises(UserError, match=r"no such run in .*; newest: old, new \(did you mean 'new'\?\)"):
        find_run("ne")


def test_while_containers_start_no_agent_speaks_and_status_says_so(run: RunDir) -> None:
    began = time.time() - 45
    run.segment(3).path.mkdir(parents=True, exist_ok=True)
    run.segment(3).container_start_file.write_text(f"{began:.9f}\n")
    save(run, 2, start=4, reached=8)
    queue = Queue(j11="COMPLETED", j12="COMPLETED", j13="RUNNING")
    third = read_state(run, queue).segments[2]
    assert (third.phase, third.attempts) == (phases.CONTAINER_START, 0)
    assert third.phase_s == pytest.approx(45, abs=5)
    # Node 0's agent marks the same moment, and from then on its own phases count.
    directory = run.segment(3).attempt(0).path
    directory.mkdir()
    append_json(directory / "phases.jsonl", {"phase": phases.CONTAINER_START, "time": round(began, 3)})
    append_json(directory / "phases.jsonl", {"phase": phases.BRING_UP, "time": began + 40})
    third = read_state(run, queue).segments[2]
    assert (third.phase, third.seconds) == (phases.BRING_UP, {phases.CONTAINER_START: 40.0})
