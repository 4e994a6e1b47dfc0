"""Where an attempt begins and ends, and what it will not do."""

from pathlib import Path

import pytest
from test_node import node_spec

from dsv4kit.node import resume
from dsv4kit.node.attempt import Attempt
from dsv4kit.run import ends, outcome
from dsv4kit.run.course import Course, SegmentRequest
from dsv4kit.run.directory import RunDir
from dsv4kit.run.node_spec import NodeSpec


def save_checkpoint(spec: NodeSpec, step: int) -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_in"))
    from stand_in_trainer import save

    save(Path(spec.checkpoint_dir), step, ranks=1)


@pytest.fixture
def spec(tmp_path: Path) -> NodeSpec:
    return node_spec(tmp_path)


def attempt(run: Path, segment: int = 1, number: int = 0) -> Attempt:
    made = Attempt(RunDir(run), segment, number, rank=0, job_id="7")
    made.dir.mkdir(parents=True, exist_ok=True)
    return made


def test_a_new_run_begins_at_step_0(spec: NodeSpec, tmp_path: Path) -> None:
    found = resume.set_course(spec, attempt(tmp_path))
    assert (found.start, found.target, found.refusal) == (0, 3, [])


def test_a_segment_goes_on_from_the_tracker_and_ends_no_later_than_the_run(spec: NodeSpec, tmp_path: Path) -> None:
    save_checkpoint(spec, 4)
    found = resume.set_course(spec, attempt(tmp_path, 2))
    assert (found.start, found.target) == (4, 6)


def test_a_run_that_has_saved_and_lost_everything_is_refused(spec: NodeSpec, tmp_path: Path) -> None:
    lost = outcome.Outcome(1, 0, "1", 0, 3, reached=3, end=ends.COMPLETED, next="continue", reason="")
    outcome.save(lost, attempt(tmp_path).segment_dir)
    found = resume.set_course(spec, attempt(tmp_path, 2))
    assert "not starting over" in found.refusal[0]


def test_starting_over_happens_only_when_asked(spec: NodeSpec, tmp_path: Path) -> None:
    save_checkpoint(spec, 3)
    second = attempt(tmp_path, 2)
    SegmentRequest(0, allow_restart=True).save(second.segment_dir)
    assert resume.set_course(spec, second).start == 0
    assert not (tmp_path / "checkpoints" / "global_step_3").exists()
    assert list((tmp_path / "quarantine").iterdir())


def test_a_request_counts_for_the_first_attempt_only(spec: NodeSpec, tmp_path: Path) -> None:
    save_checkpoint(spec, 2)
    save_checkpoint(spec, 4)
    first = attempt(tmp_path, 2)
    SegmentRequest(2).save(first.segment_dir)
    begun = resume.set_course(spec, first)
    begun.save(first.files)
    assert begun.start == 2
    save_checkpoint(spec, 4)
    assert resume.set_course(spec, attempt(tmp_path, 2, number=1)).start == 4


def test_a_request_outlives_an_attempt_that_never_began(spec: NodeSpec, tmp_path: Path) -> None:
    save_checkpoint(spec, 2)
    save_checkpoint(spec, 4)
    SegmentRequest(2).save(attempt(tmp_path, 2).segment_dir)
    assert resume.set_course(spec, attempt(tmp_path, 2, number=1)).start == 2


def test_a_start_again_in_the_same_job_keeps_the_target_a_new_job_has_its_own(spec: NodeSpec, tmp_path: Path) -> None:
    first = attempt(tmp_path)
    resume.set_course(spec, first).save(first.files)
    save_checkpoint(spec, 1)
    assert resume.set_course(spec, first.following()).target == 3
    assert resume.set_course(spec, attempt(tmp_path, 1, number=1)).target == 4


def test_an_attempt_that_left_no_outcome_is_closed_as_lost(spec: NodeSpec, tmp_path: Path) -> None:
    first = attempt(tmp_path)
    Course(0, 3).save(first.files)
    save_checkpoint(spec, 2)
    assert resume.set_course(spec, attempt(tmp_path, 1, number=1)).start == 2
    lost = outcome.load(first.files)
    assert lost is not None
    assert (lost.end, lost.start, lost.reached) == (ends.LOST, 0, 2)
