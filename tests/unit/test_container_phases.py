"""The container's start and removal: phases of their own, from the batch script's srun to the agent and back."""

import time
from pathlib import Path

import pytest

from dsv4kit.node import restart
from dsv4kit.node.attempt import Attempt
from dsv4kit.run import cost, ends, outcome, phases
from dsv4kit.run.directory import RunDir
from dsv4kit.run.phases import Mark
from dsv4kit.run.reader import AttemptReader

MARKS = [
    Mark(phases.CONTAINER_START, 100.0),
    Mark(phases.BRING_UP, 160.0),
    Mark(phases.IMPORT, 170.0),
    Mark(phases.STEPS, 200.0),
    Mark(phases.END, 300.0),
    Mark(phases.CONTAINER_REMOVAL, 305.0, 335.0),
]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = Attempt(RunDir(tmp_path), 1, 0, 0, "7")
    made.files.path.mkdir(parents=True)
    return made


def done(attempt: Attempt) -> outcome.Outcome:
    made = outcome.Outcome(1, 0, "7", 0, 4, 4, ends.COMPLETED, outcome.FINISHED, "", started=100.0, ended=305.0)
    outcome.save(made, attempt.segment_dir)
    return made


def test_the_removal_comes_after_the_attempt_and_does_not_shorten_its_end() -> None:
    spent = phases.seconds(MARKS, ended=305.0)
    assert spent == {
        "container start": 60.0,
        "bring-up": 10.0,
        "import": 30.0,
        "steps": 100.0,
        "end": 5.0,
        "container removal": 30.0,
    }


def test_a_run_of_an_older_kit_has_neither(attempt: Attempt) -> None:
    marks, _ = phases.parse([b'{"phase": "bring-up", "time": 5.0}', b'{"phase": "end", "time": 6.0}'])
    assert phases.seconds(marks, 7.0) == {"bring-up": 1.0, "end": 1.0}
    assert attempt.container_began() is None


def test_both_are_among_what_the_nodes_were_held_for(attempt: Attempt) -> None:
    spent = cost.spent(MARKS, [], done(attempt), now=1000.0)
    assert (spent[cost.START], spent[cost.STEPS], spent[cost.END]) == (100.0, 100.0, 35.0)


def test_a_start_in_the_same_job_needs_no_container() -> None:
    spent = phases.seconds(MARKS, ended=305.0)
    assert restart.needed_s(spent, steps=10) == 10.0 + 30.0 + 10.0


def test_node_0_marks_when_its_container_began_to_start(attempt: Attempt) -> None:
    attempt.segment_dir.container_start_file.write_text(f"{time.time() - 60:.9f}\n")
    began = attempt.container_began()
    assert began is not None
    written = phases.Phases(attempt.files.phases_file)
    written.begin(phases.CONTAINER_START, began)
    written.begin(phases.BRING_UP)
    marks, _ = phases.parse(attempt.files.phases_file.read_bytes().splitlines())
    assert phases.seconds(marks, None)["container start"] == pytest.approx(60, abs=5)
    # An attempt that the same job makes after it runs in the same container.
    assert attempt.following().container_began() is None


@pytest.mark.parametrize("content", ["", "soon", "9999999999.5"])
def test_a_time_that_cannot_be_is_no_start(attempt: Attempt, content: str) -> None:
    attempt.segment_dir.container_start_file.write_text(content)
    assert attempt.container_began() is None


def test_who_follows_a_run_sees_the_removal_though_the_outcome_was_there_before(attempt: Attempt) -> None:
    for mark in MARKS[:-1]:
        phases.append_json(attempt.files.phases_file, {"phase": mark.phase, "time": mark.time})
    reader = AttemptReader(attempt.files)
    done(attempt)
    reader.look()
    assert reader.outcome is not None
    phases.append_json(attempt.files.phases_file, MARKS[-1]._asdict())
    reader.look()
    assert reader.marks == MARKS
