"""The driver's watch, over a stand-in trainer that runs as a process like the real one."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_node import node_spec

from dsv4kit.checkpoint import inspection, tracker
from dsv4kit.node.driver import Driver, DriverEnd, command, phase_of
from dsv4kit.run import ends, phases
from dsv4kit.run.directory import AttemptDir
from dsv4kit.run.driver_log import DriverLog
from dsv4kit.run.node_spec import Limits, NodeSpec
from dsv4kit.run.phases import Phases, parse

TESTS = Path(__file__).parents[1]


def drive(
    tmp_path: Path,
    target: int = 3,
    start: int = 0,
    spec: NodeSpec | None = None,
    interrupted: Callable[[], str | None] = lambda: None,
    notes: list[str] | None = None,
    **env: str,
) -> DriverEnd:
    attempt = AttemptDir(tmp_path / f"attempt-{len(list(tmp_path.glob('attempt-*')))}")
    attempt.path.mkdir()
    spec = spec or node_spec(tmp_path)
    driver = Driver(spec, attempt, Phases(attempt.phases_file), start, command(spec, start, target))
    variables = {
        **os.environ,
        "PYTHONPATH": str(TESTS / "stand_in"),
        "VERL_FILE_LOGGER_PATH": str(attempt.metrics_file),
        "STAND_IN_STEP_S": "0.01",
        **env,
    }
    ended = driver.run(variables, interrupted)
    driver.checkpoints.close(60, threading.Event())
    if notes is not None:
        notes += driver.notes
    return ended


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


def test_time_in_which_the_job_was_suspended_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed job was killed as stalled at its first look."""
    real, suspended = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: real() + suspended)

    def interrupted() -> str | None:
        nonlocal suspended
        suspended += 3600 * ((tmp_path / "checkpoints/global_step_2").exists() and not suspended)
        return None

    assert drive(tmp_path, interrupted=interrupted, STAND_IN_STEP_S="0.5") == DriverEnd(0, None, [])
    assert suspended == 3600


def test_a_save_may_be_silent_for_as_long_as_it_is_planned_to_take(tmp_path: Path) -> None:
    limits = Limits(1, 1, stall_s=60, max_attempts_without_progress=2, save_s=600)
    marks = Phases(tmp_path / "phases.jsonl")
    driver = Driver(node_spec(tmp_path, limits=limits), AttemptDir(tmp_path / "attempt-0"), marks, 0, ["true"])
    allowed = []
    for phase in (phases.STEPS, phases.SAVE, phases.STEPS):
        marks.begin(phase)
        allowed.append(driver._allowed_silence_s())
    assert allowed == [60, 660, 60]


def test_an_interruption_ends_it(tmp_path: Path) -> None:
    ended = drive(tmp_path, interrupted=lambda: ends.TERMINATED, STAND_IN_STEP_S="30")
    assert ended.ended_as == ends.TERMINATED
    assert ended.exit_status != 0


def test_a_crash_is_reported_as_it_is(tmp_path: Path) -> None:
    assert drive(tmp_path, STAND_IN_FAULT="crash@2") == DriverEnd(1, None, [])


RAY = "(TaskRunnerV1 pid=7) INFO:2026-11-30 12:53:01,123:"


def phases_of(*lines: str, saved: int = 0) -> list[str]:
    """What the driver is doing after each line."""
    log = DriverLog()
    return [phase_of(log, saved) for line in lines if log.feed(line) is not None]


def test_every_part_of_a_start_is_a_phase() -> None:
    assert phases_of(
        "importing",
        f"{RAY}Total training steps: 4",
        f"{RAY}actor and ref model engine initialized",
        f"{RAY}checkpoint engine manager initialized",
        f"{RAY}Resuming from /r/global_step_2, setting global step to 2",
        f"{RAY}all initialize finished, ready to fit",
    ) == ["import", "actor", "rollout", "load", "load", "steps"]


def test_sft_tells_of_no_engines() -> None:
    begins = [
        "Found latest checkpoint: /r/global_step_4 (step 4)",
        "[Rank 0] Total training steps: 8,",
        "step:5 - train/loss:1.25",
    ]
    assert phases_of("importing", *begins) == ["import", "steps", "steps", "steps"]
    assert phases_of("[Rank 0] Total training steps: 8,") == ["steps"]


def test_a_save_lasts_until_the_tracker_names_it_or_the_next_step_is_made() -> None:
    step, saving = f"{RAY}step:{{}} - training/global_step:{{}}", f"{RAY}Saving checkpoint to /r/global_step_2"
    assert phases_of(step.format(1, 1), saving) == ["steps", "save"]
    assert phases_of(step.format(1, 1), saving, saved=2) == ["steps", "steps"]
    assert phases_of(saving, step.format(3, 3))[-1] == "steps"


def test_the_phases_of_a_start_are_kept_as_they_are_logged(tmp_path: Path) -> None:
    drive(tmp_path, STAND_IN_SAYS=f"{RAY}Total training steps: 4\n{RAY}actor and ref model engine initialized")
    marks, notes = parse((tmp_path / "attempt-0" / "phases.jsonl").read_bytes().splitlines())
    told = [mark.phase for mark in marks if mark.phase != "import"]  # which the lead marks before
    assert told[:3] == ["actor", "rollout", "steps"]
    assert notes == []


def test_a_data_order_that_was_lost_is_noted_after_a_resume_and_not_at_the_begin(tmp_path: Path) -> None:
    warning = "Warning: No dataloader state found at /r/global_step_3/data.pt, will start from scratch"
    drive(tmp_path, STAND_IN_SAYS=warning)
    drive(tmp_path, start=3, target=6, STAND_IN_SAYS=warning)
    first, second = (parse((tmp_path / f"attempt-{n}" / "phases.jsonl").read_bytes().splitlines())[1] for n in (0, 1))
    assert first == []
    assert second == [
        "the order of the data was lost at the resume from step 3, and begins anew: No dataloader state found at"
        " /r/global_step_3/data.pt, will start from scratch"
    ]


def test_an_end_in_the_middle_of_a_save_is_noted(tmp_path: Path) -> None:
    notes: list[str] = []
    drive(tmp_path, notes=notes, STAND_IN_FAULT="crash@2", STAND_IN_SAYS=f"{RAY}Saving checkpoint to /r/global_step_2")
    assert notes == ["it ended while the checkpoint of step 2 was being saved"]


def test_a_gradient_that_is_not_a_number_is_told_and_ends_nothing(tmp_path: Path) -> None:
    notes: list[str] = []
    assert drive(tmp_path, notes=notes, STAND_IN_FAULT="nan@2!") == DriverEnd(0, None, [])
    assert notes == ["actor/grad_norm is not a number (NaN or infinite) in step 2"]
    assert notes == parse(next(tmp_path.glob("attempt-*")).joinpath("phases.jsonl").read_bytes().splitlines())[1]


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


GATES = {
    "mode": "act",
    "not_a_number": {"action": "stop_now", "in_a_row": 2},
    "agreement": {"action": "stop", "in_a_row": 1, "least": 0.999},
}


def test_a_gate_that_stops_now_ends_the_driver_and_says_why(tmp_path: Path) -> None:
    bad = '{"1": {"actor/grad_norm": null}, "2": {"actor/grad_norm": null}}'
    gate = tmp_path / "never"
    ended = drive(tmp_path, spec=node_spec(tmp_path, gates=GATES), STAND_IN_METRICS=bad, STAND_IN_GATE=f"3:{gate}")
    assert ended.ended_as == ends.GATE
    assert ended.evidence == [
        "actor/grad_norm not a number (NaN or infinite) in step 2, 2 steps in a row"
        " (watch.gates.not_a_number: stop_now)"
    ]


def test_a_gate_at_a_boundary_asks_the_trainer_to_save_and_end(tmp_path: Path) -> None:
    bad = '{"1": {"training/rollout_actor_probs_pearson_corr": 0.97}}'
    notes: list[str] = []
    gate = tmp_path / "STOP"  # the second step begins when the segment has been asked to end
    ended = drive(
        tmp_path,
        spec=node_spec(tmp_path, gates=GATES),
        notes=notes,
        STAND_IN_METRICS=bad,
        STAND_IN_GATE=f"2:{gate}",
        DSV4KIT_ATTEMPT_DIR=str(tmp_path / "attempt-0"),
    )
    assert (ended.exit_status, ended.ended_as) == (0, None)
    assert tracker.read_tracker(tmp_path / "checkpoints") == 2
    assert notes == [
        "rollout and actor agree to 0.9700 (Pearson), below 0.999, in step 1 (watch.gates.agreement: stop)"
    ]
