"""SFT for real: Slurm, torchrun, verl's SFT trainer on two nodes, an epoch's end at the border of two segments."""

import json
import subprocess
from pathlib import Path

import pytest
from user import Kit

from dsv4kit.trainer import metrics

HERE = Path(__file__).parent
# 256 toy conversations in batches of 64: 4 steps are one epoch, and the first segment ends with it.
SIZES = ("--recipe=sft", "--save-freq=2", "--set=data.train_batch_size=64")


@pytest.fixture(scope="module")
def chained(kit: Kit) -> str:
    """4 steps, and a resume that makes two more."""
    kit.run("sft-chained", *SIZES, "--steps=4", "--segment-steps=4")
    done = kit("resume", "sft-chained", "--steps=6")
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def uninterrupted(kit: Kit, chained: str) -> str:
    """The same in one segment."""
    return kit.run("sft-uninterrupted", *SIZES, "--steps=6", "--segment-steps=6")


def losses(kit: Kit, run: str) -> list[metrics.StepMetrics]:
    files = sorted((kit.runs / run).glob("segments/*/attempt-0/metrics.jsonl"))
    return metrics.merge(metrics.read_metrics(path) for path in files)


def test_the_chain_goes_on_where_it_ended_and_shows_the_loss(kit: Kit, chained: str) -> None:
    status = kit.status("sft-chained")
    assert status["verdict"] == "finished"
    assert [(segment["start_step"], segment["end_step"]) for segment in status["segments"]] == [(0, 4), (4, 6)]
    assert [segment["end"] for segment in status["segments"]] == ["completed", "completed"]
    for step in (5, 6):
        assert f"step {step}/6: loss" in chained


def test_both_nodes_trained_without_ray(kit: Kit, chained: str) -> None:
    attempt = kit.runs / "sft-chained" / "segments" / "0001" / "attempt-0"
    assert len(list((attempt / "nodes").glob("*.torchrun.log"))) == 1
    assert not (attempt / "ray_head.json").exists()
    checkpoint = kit.runs / "sft-chained" / "checkpoints" / "global_step_4"
    assert {path.name for path in checkpoint.glob("data_*.pt")} == {"data_0.pt", "data_1.pt"}
    assert (checkpoint / "dsv4kit.sizes.json").exists()


def test_a_resume_at_an_epochs_end_trains_the_next_epoch(kit: Kit, chained: str, uninterrupted: str) -> None:
    one, other = losses(kit, "sft-chained"), losses(kit, "sft-uninterrupted")
    assert [step.step for step in one] == list(range(1, 7)) == [step.step for step in other]
    for a, b in zip(one, other, strict=True):
        # The count of tokens starts again with each start of the trainer.
        differing = [name for name in metrics.differing(a.data, b.data) if "total_tokens" not in name]
        assert differing == [], f"step {a.step}"


def test_the_weights_are_those_of_an_uninterrupted_run(kit: Kit, chained: str, uninterrupted: str) -> None:
    import yaml

    python = yaml.safe_load((kit.runs / "sft-chained" / "run.yaml").read_text())["python"]
    sides = [kit.runs / run / "checkpoints" / "global_step_6" for run in ("sft-chained", "sft-uninterrupted")]
    done = subprocess.run([python, HERE / "compare_checkpoints.py", *sides, "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    difference = json.loads(done.stdout)
    assert difference["tensors"] > 50
    assert (difference["model"], difference["optim"]) == (0.0, 0.0)
