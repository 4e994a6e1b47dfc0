"""When a job starts its trainer again, and when that is left to the next one."""

import pytest

from dsv4kit.node import restart
from dsv4kit.run import ends, outcome, phases


def failed(end: str = ends.KILLED, following: str = outcome.CONTINUE, reached: int = 2) -> outcome.Outcome:
    """An attempt that began at step 1 and should have reached step 4."""
    return outcome.Outcome(1, 0, "7", 1, 4, reached, end, following, "")


def due(result: outcome.Outcome, **changes: object) -> bool:
    asked = {"avoided": False, "restarts": 0, "limit": 2, "left_s": 900.0, "needed_s": 600.0, **changes}
    return restart.is_due(result, **asked)  # type: ignore[arg-type]


def test_a_driver_that_was_killed_is_started_again() -> None:
    assert due(failed())


@pytest.mark.parametrize(
    "end",
    [
        *(ends.COMPLETED, ends.STOPPED, ends.TIME_LIMIT, ends.TERMINATED, ends.CANCELLED, ends.ANOTHER_LIVE),
        *(ends.CONFIGURATION, ends.CHECKPOINT, ends.WRONG_STEP, ends.STORAGE_FULL, ends.PREFLIGHT, ends.GPU_FAULT),
    ],
)
def test_what_another_start_cannot_get_past_is_not(end: str) -> None:
    assert not due(failed(end))


def test_a_blamed_node_is_left_out_by_the_next_job_only() -> None:
    assert not due(failed(), avoided=True)


def test_it_is_bounded_and_the_stop_of_the_run_comes_first() -> None:
    assert not due(failed(), restarts=2)
    assert not due(failed(following=outcome.STOP))


def test_not_where_a_start_a_step_and_a_save_no_longer_fit_into_the_time() -> None:
    assert not due(failed(), left_s=599.0)


def test_the_time_needed_is_what_the_last_attempt_took_to_save_a_step() -> None:
    spent = {phases.BRING_UP: 20.0, phases.IMPORT: 80.0, phases.STEPS: 90.0, phases.SAVE: 30.0, phases.END: 5.0}
    assert restart.needed_s(spent, 3) == 140.0
    assert restart.needed_s({phases.BRING_UP: 20.0}, 0) == 20.0
