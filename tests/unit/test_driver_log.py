"""What verl's driver log says about the resumed step and the start. Message texts are those of verl 0.9.1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4kit.run.driver_log import DriverLog, Phase, clean

RAY = "\x1b[36m(TaskRunnerV1 pid=4711, ip=10.77.0.2)\x1b[0m "
LOGGING = "INFO:2026-11-30 12:53:01,123:"
STEP = "step:{} - training/global_step:{} - actor/pg_loss:np.float64(0.1) - critic/score/mean:0.5"


def fed(*lines: str) -> DriverLog:
    log = DriverLog()
    for line in lines:
        log.feed(line + "\n")
    return log


def step(number: int) -> str:
    return RAY + STEP.format(number, number)


@pytest.mark.parametrize(
    "line",
    [
        "Resuming from /r/global_step_2, setting global step to 2",
        f"{LOGGING}Resuming from /r/global_step_2, setting global step to 2",
        f"{RAY}{LOGGING}Resuming from /r/global_step_2, setting global step to 2",
        f"(TaskRunnerV1 pid=4711) {LOGGING}Resuming from /r/global_step_2, setting global step to 2",
        f"12:53:01 {RAY}{LOGGING}Resuming from /r/global_step_2, setting global step to 2",
        f"\x1b[36m(pid=4711)\x1b[0m {LOGGING}Resuming from /r/global_step_2, setting global step to 2",
        f"Training Progress:   0%|  | 0/4\r{RAY}{LOGGING}Resuming from /r/global_step_2, setting global step to 2",
        f"{RAY}{LOGGING}Resuming from /r/global_step_2, setting global step to 2 [repeated 2x across cluster]",
    ],
)
def test_the_resumed_step_of_ppo(line: str) -> None:
    log = fed(line)
    assert (log.resumed_step, log.resumed_path) == (2, "/r/global_step_2")


def test_ppo_from_scratch() -> None:
    log = fed(
        f"{RAY}Checkpoint tracker file does not exist: /r/latest_checkpointed_iteration.txt",
        f"{RAY}{LOGGING}Training from scratch",
    )
    assert log.resumed_step == 0
    assert log.contradicts(0) is None
    assert log.contradicts(40) == "expected to resume from step 40, but verl resumed from step 0"


def test_a_tracker_that_names_a_lost_step_is_a_start_from_scratch() -> None:
    assert fed(f"{RAY}Checkpoint does not exist: %s /r/global_step_40").resumed_step == 0


def test_the_resumed_step_of_sft() -> None:
    log = fed("[default0]:Found checkpoint: %s /r/global_step_4", "Found latest checkpoint: /r/global_step_4 (step 4)")
    assert log.resumed_step == 4


def test_a_resumed_step_wins_over_an_earlier_scratch() -> None:
    """SFT with `resume_mode=resume_path` may be told of a missing tracker first."""
    log = fed(
        "Checkpoint tracker file does not exist: /r/latest_checkpointed_iteration.txt",
        "[Rank 0] StatefulDataLoader will automatically resume from global step: 4",
    )
    assert log.resumed_step == 4


def test_where_the_log_never_says_the_first_trained_step_tells() -> None:
    log = fed("step:5 - train/loss:1.25 - train/lr:1e-05", "step:6 - train/loss:1.20")
    assert (log.said_step, log.resumed_step, log.first_step, log.last_step) == (None, 4, 5, 6)
    assert log.contradicts(4) is None
    assert log.contradicts(0)


def test_nothing_is_contradicted_while_nothing_is_known() -> None:
    assert DriverLog().contradicts(40) is None
    assert DriverLog().resumed_step is None


def test_a_log_that_says_one_step_and_trains_another_is_caught() -> None:
    log = fed(f"{RAY}{LOGGING}Resuming from /r/global_step_40, setting global step to 40", step(1))
    assert log.contradicts(40) == "expected step 41 first, but verl trained step 1"


def test_a_lost_data_order_is_noticed() -> None:
    log = fed(
        f"{RAY}WARNING:2026-11-30 12:53:01,123:Warning: No dataloader state found at /r/global_step_2/data.pt,"
        " will start from scratch"
    )
    assert log.data_order_lost


def test_phases_come_in_order() -> None:
    log = DriverLog()
    seen = []
    for line in (
        "Total training steps: 4",
        "create worker group dict_keys(['actor_rollout_ref'])",
        "actor and ref model engine initialized",
        "LLMServerManager: ['10.0.0.1:4000', '10.0.0.2:4000']",
        "checkpoint engine manager initialized",
        "Resuming from /r/global_step_2, setting global step to 2",
        "all initialize finished, ready to fit",
    ):
        seen += [event.phase for event in log.feed(f"{RAY}{LOGGING}{line}") if event.phase]
    seen += [event.phase for event in log.feed(step(3)) if event.phase]
    assert seen == [Phase.CONFIGURED, Phase.ACTOR_READY, Phase.ROLLOUT_READY, Phase.READY, Phase.TRAINING]
    assert (log.first_step, log.last_step) == (3, 3)


def test_a_validation_before_training_is_no_trained_step() -> None:
    log = fed(f"{RAY}step:2 - val-core/gsm8k/reward/mean@1:0.5", step(3))
    assert log.first_step == 3


def test_a_save_in_progress_is_known() -> None:
    log = fed(step(20), f"{RAY}{LOGGING}Saving checkpoint to /r/global_step_20")
    assert log.saving_step == 20
    assert fed("Saving checkpoint to: /r/global_step_6").saving_step == 6


@pytest.mark.parametrize(
    "text",
    [
        "[response] Resuming from /x/global_step_9, setting global step to 9",
        "the model wrote: Training from scratch",
        "{'resume': 'Training from scratch'}",
        "Training from scratch is what we do",
    ],
)
def test_text_that_only_mentions_a_message_is_not_one(text: str) -> None:
    assert fed(RAY + text).resumed_step is None


def test_generated_text_after_the_first_step_cannot_pose_as_a_message() -> None:
    log = fed(f"{RAY}{LOGGING}Resuming from /r/global_step_2, setting global step to 2", step(3))
    assert log.feed("Resuming from /x/global_step_9, setting global step to 9") == []
    assert log.resumed_step == 2


def test_steps_and_resumes_are_the_trainers_own_to_tell() -> None:
    log = fed("(RewardLoopWorker pid=9) step:12 - actor/loss:0.3", "(RewardLoopWorker pid=9) Training from scratch")
    assert (log.first_step, log.resumed_step) == (None, None)
    log = fed(f"{RAY}hello", "step:12 - actor/loss:0.3")  # under Ray the trainer's lines have its prefix
    assert log.first_step is None
    assert fed("step:12 - train/loss:0.3").first_step == 12  # SFT, without Ray


def test_prefixes_and_colours_are_taken_off() -> None:
    assert clean(f"{RAY}{LOGGING}hello \x1b[32mworld\x1b[0m\n") == "hello world"
    assert clean("(some remark) stays") == "(some remark) stays"
    assert clean("Training Progress: 50%|##| 2/4\r\n") == "Training Progress: 50%|##| 2/4"


@given(st.text(max_size=300))
def test_no_text_upsets_it(text: str) -> None:
    DriverLog().feed(text)
