"""The driver's watch, over a stand-in trainer that runs as a process like the real one."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from test_node import node_spec

from dsv4kit.checkpoint import inspection, tracker
from dsv4kit.node.driver import Driver, DriverEnd, command
from dsv4kit.run import ends
from dsv4kit.run.node_spec import Limits, NodeSpec
from dsv4kit.run.phases import Phases

TESTS = Path(__file__).parents[1]


def drive(
    tmp_path: Path,
    target: int = 3,
    start: int = 0,
    spec: NodeSpec | None = None,
    interrupted: Callable[[], str | None] = lambda: None,
    **env: str,
) -> DriverEnd:
    attempt = tmp_path / f"attempt-{len(list(tmp_path.glob('attempt-*')))}"
    attempt.mkdir()
    spec = spec or node_spec(tmp_path)
    driver = Driver(spec, attempt, Phases(attempt / "phases.jsonl"), start, command(spec, start, target))
    variables = {
        **os.environ,
        "PYTHONPATH": str(TESTS / "stand_in"),
        "VERL_FILE_LOGGER_PATH": str(attempt / "metrics.jsonl"),
        "STAND_IN_STEP_S": "0.01",
        **env,
    }
    return driver.run(variables, interrupted)


def test_it_ends_with_the_last_step_saved_and_sized(tmp_path: Path) -> None:
    assert drive(tmp_path) == DriverEnd(0, None, [])
    state = inspection.inspect(tmp_path / "checkpoints", ["model", "optimizer", "extra"])
    assert state.tracker.step == 3
    assert state.steps[-1].recorded


def test_a_second_segment_resumes_where_the_first_ended(tmp_path: Path) -> None:
    drive(tmp_path)
    assert drive(tmp_path, start=3, target=6).exit_status == 0
    assert tracker.read_tracker(tmp_path / "checkpoints") == 6


def test_resuming_at_another_step_than_planned_ends_it_with_the_evidence(tmp_path: Path) -> None:
    drive(tmp_path)
    ended = drive(tmp_path, start=2, target=6, STAND_IN_STEP_S="30")
    assert ended.ended_as == ends.WRONG_STEP
    assert "resume from step 2" in ended.evidence[0]


def test_silence_for_too_long_is_a_stall(tmp_path: Path) -> None:
    limits = Limits(min_memory_bytes=1, min_shm_bytes=1, stall_s=0.6, max_attempts_without_progress=2)
    ended = drive(tmp_path, spec=node_spec(tmp_path, limits=limits), STAND_IN_FAULT="hang@2")
    assert ended.ended_as == ends.STALLED
    assert "no log line and no finished step" in ended.evidence[0]


def test_an_interruption_ends_it(tmp_path: Path) -> None:
    ended = drive(tmp_path, interrupted=lambda: ends.TERMINATED, STAND_IN_STEP_S="30")
    assert ended.ended_as == ends.TERMINATED
    assert ended.exit_status != 0


def test_a_crash_is_reported_as_it_is(tmp_path: Path) -> None:
    assert drive(tmp_path, STAND_IN_FAULT="crash@2") == DriverEnd(1, None, [])


@pytest.mark.parametrize("start", [0])
def test_phases_say_when_the_steps_began(tmp_path: Path, start: int) -> None:
    drive(tmp_path, start=start)
    assert '"steps"' in (tmp_path / "attempt-0" / "phases.jsonl").read_text()


def test_each_start_draws_noise_of_its_own_unless_the_samples_have_their_seeds(tmp_path: Path) -> None:
    """Otherwise every segment replays the first one's: vLLM's generator starts again at its seed."""
    key = "actor_rollout_ref.rollout.seed="
    one, two = (
        next(word for word in command(node_spec(tmp_path, rollout_seed=42), start, 80) if word.startswith(key))
        for start in (0, 40)
    )
    assert one == f"{key}42"
    # Further apart than replicas, whose number verl adds, and within vLLM's range at any step.
    assert int(two.removeprefix(key)) - 42 > 1024
    late = command(node_spec(tmp_path, rollout_seed=42), 10**6, 10**6 + 1)[-1]
    assert 0 <= int(late.removeprefix(key)) < 2**31
    assert not any(key in word for word in command(node_spec(tmp_path, rollout_seed=None), 40, 80))
