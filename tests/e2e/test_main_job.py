"""The main job, for real: Slurm, Ray, verl, vLLM, checkpoints and resumes on this machine, also inside an image.

The chain runs from the squashfs that `make image HW=cpu` makes, the run it is held against outside of any. The image is
built where there is none yet for what is here (6 minutes of CPU, 9 GB below $DSV4KIT_CACHE). DSV4KIT_TEST_IMAGE=FILE
takes that image; DSV4KIT_TEST_IMAGE=0 runs the chain without one and skips what is about it.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from user import Kit

from dsv4kit.image import contents, record
from dsv4kit.run import metrics

HERE = Path(__file__).parent
ENTER = HERE.parents[1] / "dsv4kit" / "node" / "enter_image.sh"
WANTED = os.environ.get("DSV4KIT_TEST_IMAGE", "1")
STEPS = 6
SIZES = (f"--steps={STEPS}", "--save-freq=3")

of_the_image = pytest.mark.skipif(WANTED == "0", reason="DSV4KIT_TEST_IMAGE=0")


@pytest.fixture(scope="module")
def image(kit: Kit) -> Path | None:
    if WANTED == "0":
        return None
    if WANTED != "1":
        return Path(WANTED)
    done = kit("image", "build", "--hw=cpu")
    assert done.returncode == 0, done.stdout
    return Path(re.findall(r"IMAGE=(\S+),", done.stdout)[-1])


@pytest.fixture(scope="module")
def chained(kit: Kit, image: Path | None) -> str:
    """The default run but for its length: a start of the trainer costs as much as twenty steps."""
    return kit.run("chained", *SIZES, "--segment-steps=3", *([f"--image={image}"] if image else []))


@pytest.fixture(scope="module")
def uninterrupted(kit: Kit, chained: str) -> str:
    """The same steps in one segment, and in no image."""
    return kit.run("uninterrupted", *SIZES, f"--segment-steps={STEPS}")


def test_the_plan_comes_first_and_every_step_is_shown(chained: str) -> None:
    assert "plan: 6 steps in 2 segments of 3 on 2 nodes" in chained
    for step in range(1, STEPS + 1):
        assert f"step {step}/{STEPS}: reward" in chained


def test_each_segment_resumes_where_the_one_before_ended(kit: Kit, chained: str) -> None:
    status = kit.status("chained")
    assert status["state"] == "finished"
    assert status["saved_step"] == STEPS
    steps = [(segment["start_step"], segment["end_step"]) for segment in status["segments"]]
    assert steps == [(0, 3), (3, 6)]
    assert len({segment["job_id"] for segment in status["segments"]}) == 2
    assert all(segment["state"] == "COMPLETED" for segment in status["segments"])


def test_the_reward_rises_across_the_borders_of_segments(kit: Kit, chained: str) -> None:
    rewards = [reward for _, reward in sorted((int(s), r) for s, r in kit.status("chained")["rewards"].items())]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert last > first + 0.05, rewards
    assert last > 2 * first, rewards


def test_both_nodes_took_part_and_were_watched(kit: Kit, chained: str) -> None:
    attempt = kit.runs / "chained" / "segments" / "0001" / "attempt-0"
    assert {path.name for path in (attempt / "nodes").glob("*.csv")} == {"node1.csv", "node2.csv"}
    ranks = {path.name for path in (kit.runs / "chained" / "checkpoints" / "global_step_3" / "actor").glob("model_*")}
    assert ranks == {"model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"}


def test_no_secret_is_left_in_the_run_directory(kit: Kit, chained: str) -> None:
    found = subprocess.run(
        ["grep", "-rIlE", "RAY_AUTH_TOKEN=[0-9a-f]{16}", kit.runs / "chained"], capture_output=True, text=True
    )
    assert found.stdout == ""


@pytest.mark.parametrize("step", [3, 6])
def test_a_chained_run_equals_an_uninterrupted_one_to_the_last_bit(
    kit: Kit, chained: str, uninterrupted: str, step: int
) -> None:
    python = yaml.safe_load((kit.runs / "uninterrupted" / "run.yaml").read_text())["python"]
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


@of_the_image
def test_the_image_is_verified_and_fits_what_trains_in_it(kit: Kit, image: Path) -> None:
    for recipe in ("grpo", "sft"):
        done = kit("image", "verify", str(image), f"--recipe={recipe}")
        assert done.returncode == 0, done.stdout
        assert f"ok       fits {recipe}-tiny-cpu" in done.stdout
    done = kit("image", "verify", str(image), "--hw=h100")
    assert done.returncode == 1
    assert "built for HW=cpu, whose kernels h100 does not run" in done.stdout


@of_the_image
def test_another_build_of_the_same_uses_it_again(kit: Kit, image: Path) -> None:
    before = record.load(image)
    done = kit("image", "build", "--hw=cpu", f"--image={image}")
    assert done.returncode == 0, done.stdout
    assert "is there already and has exactly this inside" in done.stdout
    assert record.load(image) == before


@of_the_image
def test_the_image_is_no_larger_than_it_may_be(image: Path, tmp_path: Path) -> None:
    command = ["bash", ENTER, image, tmp_path, tmp_path, "ro", "/", "--", "du", "-x", "--bytes", "--summarize", "/"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert int(done.stdout.split()[0]) < 3.6e9, done.stderr


@of_the_image
def test_the_chain_ran_from_the_image(kit: Kit, chained: str, image: Path) -> None:
    frozen = yaml.safe_load((kit.runs / "chained" / "run.yaml").read_text())
    assert (frozen["site"]["container"]["runtime"], frozen["site"]["container"]["image"]) == ("bwrap", str(image))
    manifest = contents.manifest(str(image))
    assert manifest is not None
    for segment in ("0001", "0002"):
        log = (kit.runs / "chained" / "segments" / segment / "slurm.log").read_text()
        assert f"Python {manifest['python']}" in log
        driver = (kit.runs / "chained" / "segments" / segment / "attempt-0" / "driver.log").read_text()
        assert "/opt/venv/lib/python3" in driver


@of_the_image
def test_nothing_of_it_is_left_mounted(chained: str, image: Path) -> None:
    attached = subprocess.run(["losetup", "--all"], capture_output=True, text=True).stdout
    assert str(image) not in attached
