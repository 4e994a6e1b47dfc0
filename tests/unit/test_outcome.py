"""What the chain does next, from what an attempt did."""

from pathlib import Path

import pytest

from dsv4kit.run import ends, outcome
from dsv4kit.run.directory import AttemptDir, RunDir, SegmentDir
from dsv4kit.run.files import write_json
from dsv4kit.run.outcome import CONTINUE, FINISHED, STOP, Outcome


def made(start: int, reached: int, segment: int = 1, attempt: int = 0, **changes: object) -> Outcome:
    fields: dict[str, object] = {
        "target": reached,
        "end": ends.UNKNOWN,
        "next": CONTINUE,
        "reason": "",
        "job_id": "1",
    }
    return Outcome(segment=segment, attempt=attempt, start=start, reached=reached, **{**fields, **changes})  # type: ignore[arg-type]


def following(end: str, start: int, reached: int, past: list[Outcome] | None = None, limit: int = 3) -> str:
    return outcome.decide(end, reached=reached, total=12, start=start, history=past or [], limit=limit)[0]


def test_a_segment_that_did_its_steps_lets_the_next_one_go_on() -> None:
    assert following(ends.COMPLETED, 0, 4) == CONTINUE


def test_the_last_step_saved_is_the_end_however_the_driver_ended() -> None:
    assert following(ends.UNKNOWN, 8, 12) == FINISHED
    assert following(ends.NOTHING_TO_DO, 12, 12) == FINISHED


@pytest.mark.parametrize("end", sorted(ends.FATAL))
def test_what_trying_again_cannot_help_stops_the_chain_at_once(end: str) -> None:
    assert following(end, 4, 4) == STOP


def test_progress_is_what_counts_not_the_way_it_ended() -> None:
    assert following(ends.OUT_OF_GPU_MEMORY, 4, 6, past=[made(4, 4), made(4, 4)]) == CONTINUE


def test_attempts_without_progress_in_a_row_stop_the_chain() -> None:
    assert following(ends.UNKNOWN, 4, 4, past=[made(0, 4)]) == CONTINUE
    assert following(ends.UNKNOWN, 4, 4, past=[made(0, 4), made(4, 4)]) == CONTINUE
    assert following(ends.UNKNOWN, 4, 4, past=[made(0, 4), made(4, 4), made(4, 4)]) == STOP


def test_progress_in_between_starts_the_count_anew() -> None:
    assert following(ends.UNKNOWN, 5, 5, past=[made(4, 4), made(4, 4), made(4, 5)]) == CONTINUE


def test_an_attempt_that_found_another_job_of_the_run_at_work_changes_nothing_for_the_chain() -> None:
    aside = made(4, 4, end=ends.ANOTHER_LIVE)
    assert following(ends.ANOTHER_LIVE, 12, 12) == CONTINUE
    assert following(ends.UNKNOWN, 4, 4, past=[aside, made(4, 4), aside, aside]) == CONTINUE


@pytest.mark.parametrize("end", sorted(ends.FROM_OUTSIDE))
def test_what_slurm_or_a_node_did_has_a_larger_limit_of_its_own(end: str) -> None:
    many = [made(4, 4, end=end)] * 10
    assert following(end, 4, 4, past=many) == CONTINUE
    assert following(end, 4, 4, past=many + many) == STOP
    assert following(ends.UNKNOWN, 4, 4, past=[made(4, 4), *many]) == CONTINUE
    assert following(ends.UNKNOWN, 4, 4, past=[made(4, 4), *many, made(4, 4)]) == STOP


def test_attempts_are_counted_from_the_last_resume_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for segment in (1, 2, 3):
        outcome.save(made(4, 4, segment=segment), run.segment(segment))
    assert [one.segment for one in outcome.since_resume(run)] == [1, 2, 3]
    write_json(run.segment(2).resumed_file, {})
    assert [one.segment for one in outcome.since_resume(run)] == [2, 3]


def test_what_the_user_cancelled_is_no_attempt_without_progress() -> None:
    cancelled = made(4, 4, end=ends.CANCELLED)
    assert following(ends.UNKNOWN, 4, 4, past=[made(0, 4), cancelled, made(4, 4), cancelled]) == CONTINUE
    assert following(ends.UNKNOWN, 4, 4, past=[made(4, 4), cancelled, made(4, 4)]) == STOP


def test_a_cancelled_attempt_is_read_as_one_and_what_came_before_it_is_not(tmp_path: Path) -> None:
    for attempt, end in enumerate([ends.NETWORK, ends.TERMINATED]):
        outcome.save(made(4, 4, 1, attempt, end=end), SegmentDir(tmp_path))
    outcome.mark_cancelled(SegmentDir(tmp_path), from_attempt=1)
    first, second = (outcome.load(SegmentDir(tmp_path).attempt(attempt)) for attempt in (0, 1))
    assert first is not None
    assert second is not None
    assert (first.end, second.end, second.next) == (ends.NETWORK, ends.CANCELLED, STOP)


def test_an_attempt_that_got_there_before_the_cancel_did_is_complete(tmp_path: Path) -> None:
    done = made(0, 4, end=ends.COMPLETED)
    outcome.save(done, SegmentDir(tmp_path))
    outcome.mark_cancelled(SegmentDir(tmp_path), from_attempt=0)
    assert outcome.load(SegmentDir(tmp_path).attempt(0)) == done


def test_outcomes_are_read_back_in_the_order_of_their_attempts(tmp_path: Path) -> None:
    for segment, attempt in [(10, 0), (2, 1), (2, 0), (2, 10)]:
        outcome.save(made(0, 1, segment, attempt), RunDir(tmp_path).segment(segment))
    assert [(past.segment, past.attempt) for past in outcome.history(RunDir(tmp_path))] == [
        (2, 0),
        (2, 1),
        (2, 10),
        (10, 0),
    ]


def test_an_outcome_of_another_version_is_still_read(tmp_path: Path) -> None:
    outcome.save(made(0, 1), SegmentDir(tmp_path))
    path = tmp_path / "attempt-0" / "outcome.json"
    path.write_text(path.read_text().replace('"segment"', '"new": 1, "segment"'))
    assert outcome.load(AttemptDir(path.parent)) == made(0, 1)


def test_the_batch_script_gets_its_two_files(tmp_path: Path) -> None:
    outcome.announce(made(0, 1, excluded_nodes=["n1", "n2"]), SegmentDir(tmp_path))
    assert (tmp_path / "verdict").read_text() == "continue\n"
    assert (tmp_path / "excluded_nodes").read_text() == "n1,n2"
