"""SFT for real: Slurm, torchrun, verl's SFT trainer on two nodes, and a way back to where an epoch ended."""

import json
import subprocess
from pathlib import Path

import pytest
from user import Kit

from dsv4kit.run import metrics

HERE = Path(__file__).parent
# 256 toy conversations in batches of 64: 4 steps are one epoch.
SIZES = ("--recipe=sft", "--save-freq=2", "--set=data.train_batch_size=64", "--steps=6", "--segment-steps=6")


@pytest.fixture(scope="module")
def whole(kit: Kit) -> str:
    """6 steps in one segment."""
    return kit.run("sft", *SIZES)


@pytest.fixture(scope="module")
def again(kit: Kit, whole: str) -> str:
    """Back to the checkpoint at the epoch's end, and the last two steps in a segment of their own."""
    done = kit("resume", "sft", "--from-step=4")
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_loss_of_every_step_is_shown(whole: str) -> None:
    for step in range(1, 7):
        assert f"step {step}/6: loss" in whole


def test_a_new_segment_goes_on_from_the_step_that_was_asked_for(kit: Kit, again: str) -> None:
    assert "run sft: goes on from step 4 of 6" in again
    status = kit.status("sft")
    assert status["state"] == "finished"
    assert [(segment["start_step"], segment["end_step"]) for segment in status["segments"]] == [(0, 6), (4, 6)]
    assert [segment["end"] for segment in status["segments"]] == ["completed", "completed"]


def test_both_nodes_trained_without_ray(kit: Kit, whole: str) -> None:
    attempt = kit.runs / "sft" / "segments" / "0001" / "attempt-0"
    assert len(list((attempt / "nodes").glob("*.torchrun.log"))) == 1
    assert not (attempt / "ray_head.json").exists()
    checkpoint = kit.runs / "sft" / "checkpoints" / "global_step_4"
    assert {path.name for path in checkpoint.glob("data_*.pt")} == {"data_0.pt", "data_1.pt"}
    assert (checkpoint / "dsv4kit.sizes.json").exists()


def test_a_resume_at_an_epochs_end_trains_the_next_epoch_as_without_it(kit: Kit, again: str) -> None:
    first, second = (
        {step.step: step.data for step in metrics.read_metrics(path)}
        for path in sorted((kit.runs / "sft").glob("segments/*/attempt-0/metrics.jsonl"))
    )
    assert sorted(first) == [1, 2, 3, 4, 5, 6]
    assert sorted(second) == [5, 6]
    for step, data in second.items():
        assert "train/loss" in metrics.non_timing(data)
        # The count of tokens starts again with each start of the trainer.
        differing = [name for name in metrics.differing(first[step], data) if "total_tokens" not in name]
        assert differing == [], f"step {step}"


def test_the_weights_are_those_of_an_uninterrupted_run(kit: Kit, again: str) -> None:
    import yaml

    run = kit.runs / "sft"
    python = yaml.safe_load((run / "run.yaml").read_text())["python"]
    sides = [run / "quarantine" / "global_step_6.1", run / "checkpoints" / "global_step_6"]
    done = subprocess.run([python, HERE / "compare_checkpoints.py", *sides, "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    difference = json.loads(done.stdout)
    assert difference["tensors"] > 50
    assert (difference["model"], difference["optim"]) == (0.0, 0.0)
