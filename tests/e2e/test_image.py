"""The main job inside an image: the cpu image from pins to a squashfs, and a chain that runs from it.

Skipped unless DSV4KIT_TEST_IMAGE says where the image is, or is 1: then it is built first (6 minutes of CPU time, 5 GB
below $DSV4KIT_CACHE), or the one that is there already is used.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from user import Kit

from dsv4kit.image import contents, record

WANTED = os.environ.get("DSV4KIT_TEST_IMAGE", "")
ENTER = Path(__file__).parents[2] / "dsv4kit" / "node" / "enter_image.sh"
pytestmark = pytest.mark.skipif(not WANTED, reason="DSV4KIT_TEST_IMAGE=1 builds the cpu image and runs in it")


@pytest.fixture(scope="module")
def image(kit: Kit) -> Path:
    if WANTED != "1":
        return Path(WANTED)
    done = kit("image", "build", "--hw=cpu")
    assert done.returncode == 0, done.stdout
    return Path(re.findall(r"IMAGE=(\S+),", done.stdout)[-1])


@pytest.fixture(scope="module")
def chained(kit: Kit, image: Path) -> str:
    return kit.run("in-image", f"--image={image}", "--steps=4", "--segment-steps=2", "--save-freq=2")


def test_it_is_verified_and_fits_what_trains_in_it(kit: Kit, image: Path) -> None:
    for recipe in ("grpo", "sft"):
        done = kit("image", "verify", str(image), f"--recipe={recipe}")
        assert done.returncode == 0, done.stdout
        assert f"ok       fits {recipe}-tiny-cpu" in done.stdout
    done = kit("image", "verify", str(image), "--hw=h100")
    assert done.returncode == 1
    assert "built for HW=cpu, whose kernels h100 does not run" in done.stdout


def test_another_build_of_the_same_uses_it_again(kit: Kit, image: Path) -> None:
    before = record.load(image)
    done = kit("image", "build", "--hw=cpu", f"--image={image}")
    assert done.returncode == 0, done.stdout
    assert "is there already and has exactly this inside" in done.stdout
    assert record.load(image) == before


def test_it_is_no_larger_than_it_may_be(image: Path, tmp_path: Path) -> None:
    command = ["bash", ENTER, image, tmp_path, tmp_path, "ro", "/", "--"]
    command += ["du", "--bytes", "--summarize", "--total", "/etc", "/opt", "/usr", "/var"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert 1e9 < int(done.stdout.splitlines()[-1].split()[0]) < 3.6e9, done.stderr


def test_the_chain_ran_from_the_image(kit: Kit, chained: str, image: Path) -> None:
    status = kit.status("in-image")
    assert (status["verdict"], status["saved_step"]) == ("finished", 4)
    assert [(segment["start_step"], segment["end_step"]) for segment in status["segments"]] == [(0, 2), (2, 4)]
    frozen = yaml.safe_load((kit.runs / "in-image" / "run.yaml").read_text())
    assert (frozen["site"]["container"]["runtime"], frozen["site"]["container"]["image"]) == ("bwrap", str(image))
    manifest = contents.manifest(str(image))
    assert manifest is not None
    for segment in ("0001", "0002"):
        log = (kit.runs / "in-image" / "segments" / segment / "slurm.log").read_text()
        assert f"Python {manifest['python']}" in log
        driver = (kit.runs / "in-image" / "segments" / segment / "attempt-0" / "driver.log").read_text()
        assert "/opt/venv/lib/python3" in driver


def test_nothing_of_it_is_left_mounted(chained: str, image: Path) -> None:
    attached = subprocess.run(["losetup", "--all"], capture_output=True, text=True).stdout
    assert str(image) not in attached
