"""`dsv4kit checkpoints`: what a person and a program see of a run's checkpoints."""

import json
import shutil
from pathlib import Path

import checkpoint_trees as trees
import pytest

from dsv4kit.cli.main import run as dsv4kit

MADE = Path(__file__).parents[1] / "data" / "run-of-03a24f3"


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps 20 and 40 of a run, both complete, the tracker at 40."""
    run = tmp_path / "runs" / "mine"
    shutil.copytree(MADE, run)
    spec = json.loads((run / "node.json").read_text())
    directory = run / "checkpoints"
    shutil.rmtree(directory)
    for step in (20, 40):
        trees.ppo_fsdp(directory, step)
    (directory / trees.TRACKER).write_text("40")
    (run / "node.json").write_text(
        json.dumps({**spec, "checkpoint_dir": str(directory), "checkpoint_contents": ["model", "optimizer", "extra"]})
    )
    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path / "runs"))
    return directory


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = dsv4kit(["checkpoints", "mine", *words])
    return status, capsys.readouterr().out


def test_complete_ones_and_the_one_the_run_goes_on_from(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = shown(capsys)
    assert status == 0
    lines = text.splitlines()
    assert lines[0] == str(checkpoints)
    assert lines[2].split()[:2] == ["20", "complete"]
    assert "complete, the run goes on from it" in lines[3]
    assert lines[3].endswith("model, optimizer, extra")


def test_a_damaged_one_is_told_with_what_is_wrong(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoints / "global_step_40" / "data.pt").unlink()
    status, text = shown(capsys)
    assert status == 1
    assert "step 40: data.pt is missing" in text
    status, text = shown(capsys, "--json")
    assert [step["complete"] for step in json.loads(text)["steps"]] == [True, False]


def test_bytes_that_changed_since_they_were_first_verified(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys, "--verify")[1].count("hashes recorded") == 2
    assert shown(capsys, "--verify")[1].count("bytes unchanged") == 2
    shard = next((checkpoints / "global_step_20" / "actor").glob("model_*"))
    content = bytearray(shard.read_bytes())
    content[40] ^= 1
    shard.write_bytes(content)
    status, text = shown(capsys, "--verify")
    assert status == 1
    assert f"step 20: actor/{shard.name} has other bytes than when it was first verified" in text
    assert shown(capsys)[0] == 0


def test_a_run_without_checkpoints(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(checkpoints)
    assert shown(capsys) == (0, f"{checkpoints}\nno checkpoints\n")


def test_each_says_why_it_stays_or_that_it_would_go(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (60, 80):
        trees.ppo_fsdp(checkpoints, step)
    (checkpoints / trees.TRACKER).write_text("80")
    (checkpoints / "global_step_60" / "keep").touch()
    file = checkpoints.parent / "node.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "keep_last": 1, "keep_every": 40}))
    steps = {one["step"]: one for one in json.loads(shown(capsys, "--json")[1])["steps"]}
    assert {step: one["kept_because"] for step, one in steps.items()} == {
        20: [],
        40: ["a multiple of 40"],
        60: ["has a keep file"],
        80: ["the run goes on from it", "of the last 1", "a multiple of 40"],
    }
    assert [step for step, one in steps.items() if one["would_be_pruned"]] == [20]
    assert "no: pruned after the next save" in shown(capsys)[1]
