"""SFT for real: Slurm, torchrun, verl's SFT trainer on two nodes, and a way back to where an epoch ended.

From a file of JSON lines to text from the exported model, by the commands of docs/from-data-to-a-served-model.md.
"""

import json
import subprocess
from pathlib import Path

import pytest
from user import Kit

from dsv4kit.run import metrics

HERE = Path(__file__).parent
# 256 conversations in batches of 64: 4 steps are one epoch.
SIZES = ("--recipe=sft", "--save-freq=2", "--set=data.train_batch_size=64", "--steps=6", "--segment-steps=6")


@pytest.fixture(scope="module")
def data(kit: Kit) -> Path:
    """A user's own questions and answers, in the columns verl reads."""
    rows = [{"question": f"What is {n} plus 1?", "answer": f"One more is {n + 1}."} for n in range(256)]
    own = kit.root / "mine.jsonl"
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = kit("prepare", "data", f"--data={own}", "--format=sft", f"--out={kit.root / 'data'}")
    assert done.returncode == 0, done.stdout
    assert "train: 256 rows of 256 read, form sft" in done.stdout
    return kit.root / "data"


@pytest.fixture(scope="module")
def whole(kit: Kit, data: Path) -> str:
    """6 steps in one segment."""
    return kit.run("sft", *SIZES, f"--train-file={data / 'train.parquet'}")


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


def test_an_exported_step_has_the_checkpoints_weights_and_speaks(kit: Kit, again: str) -> None:
    import yaml

    done = kit("export", "sft", "--step=4")
    assert done.returncode == 0, done.stdout
    model = kit.runs / "sft" / "exports" / "sft-step4" / "model"
    assert f"`vllm serve {model}` serves it" in done.stdout
    python = yaml.safe_load((kit.runs / "sft" / "run.yaml").read_text())["python"]
    plugin = {"PYTHONPATH": str(HERE.parents[1]), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    words = [python, HERE / "compare_export.py", kit.runs / "sft" / "checkpoints" / "global_step_4", model]
    environment = {**kit.env, **plugin, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    ran = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["tensors"] > 20
    assert found["differing"] == []
    assert "What is 3 plus 4?" in found["chat"]
    assert found["lengths"] == [8]
    done = kit("export", "sft", "--step=4")
    assert done.returncode == 2
    assert f"STEP=4: is exported already: {model}" in done.stdout
