"""The main job, for real: Slurm, Ray, verl, vLLM, checkpoints and resumes on this machine."""

import json
import subprocess
from pathlib import Path

import pytest
from user import Kit

from dsv4kit.trainer import metrics

HERE = Path(__file__).parent
STEPS = 8


@pytest.fixture(scope="module")
def chained(kit: Kit) -> str:
    """The default run but for its length: a start of the trainer costs as much as twenty steps."""
    return kit.run("chained", f"--steps={STEPS}")


@pytest.fixture(scope="module")
def uninterrupted(kit: Kit, chained: str) -> str:
    """The same steps in one segment."""
    return kit.run("uninterrupted", f"--steps={STEPS}", f"--segment-steps={STEPS}")


def test_the_plan_comes_first_and_every_step_is_shown(chained: str) -> None:
    assert "plan: 8 steps in 2 segments of 4 on 2 nodes" in chained
    for step in range(1, STEPS + 1):
        assert f"step {step}/{STEPS}: reward" in chained


def test_each_segment_resumes_where_the_one_before_ended(kit: Kit, chained: str) -> None:
    status = kit.status("chained")
    assert status["verdict"] == "finished"
    assert status["saved_step"] == STEPS
    steps = [(segment["start_step"], segment["end_step"]) for segment in status["segments"]]
    assert steps == [(0, 4), (4, 8)]
    assert len({segment["job_id"] for segment in status["segments"]}) == 2
    assert all(segment["state"] == "COMPLETED" for segment in status["segments"])


def test_the_reward_rises_across_the_borders_of_segments(kit: Kit, chained: str) -> None:
    rewards = [reward for _, reward in sorted((int(s), r) for s, r in kit.status("chained")["rewards"].items())]
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert last > first + 0.1, rewards
    assert last > 2 * first, rewards


def test_both_nodes_took_part_and_were_watched(kit: Kit, chained: str) -> None:
    attempt = kit.runs / "chained" / "segments" / "0001" / "attempt-0"
    assert {path.name for path in (attempt / "nodes").glob("*.csv")} == {"node1.csv", "node2.csv"}
    ranks = {path.name for path in (kit.runs / "chained" / "checkpoints" / "global_step_4" / "actor").glob("model_*")}
    assert ranks == {"model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"}


def test_no_secret_is_left_in_the_run_directory(kit: Kit, chained: str) -> None:
    found = subprocess.run(
        ["grep", "-rIlE", "RAY_AUTH_TOKEN=[0-9a-f]{16}", kit.runs / "chained"], capture_output=True, text=True
    )
    assert found.stdout == ""


@pytest.mark.parametrize("step", [4, 8])
def test_a_chained_run_equals_an_uninterrupted_one_to_the_last_bit(
    kit: Kit, chained: str, uninterrupted: str, step: int
) -> None:
    import yaml

    python = yaml.safe_load((kit.runs / "chained" / "run.yaml").read_text())["python"]
    sides = [kit.runs / run / "checkpoints" / f"global_step_{step}" for run in ("chained", "uninterrupted")]
    done = subprocess.run([python, HERE / "compare_checkpoints.py", *sides, "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    difference = json.loads(done.stdout)
    assert difference["tensors"] > 50
    assert (difference["model"], difference["optim"]) == (0.0, 0.0)


def test_every_metric_but_times_is_the_same_too(kit: Kit, chained: str, uninterrupted: str) -> None:
    merged = []
    for run in ("chained", "uninterrupted"):
        files = sorted((kit.runs / run).glob("segments/*/attempt-0/metrics.jsonl"))
        merged.append(metrics.merge(metrics.read_metrics(path) for path in files))
    assert [step.step for step in merged[0]] == list(range(1, STEPS + 1)) == [step.step for step in merged[1]]
    for one, other in zip(*merged, strict=True):
        assert len(metrics.non_timing(one.data)) > 20
        assert metrics.differing(one.data, other.data) == [], f"step {one.step}"
