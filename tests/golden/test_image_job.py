"""The build of an image by a job: the Dockerfile as one script, and the job's own; as text, and for shellcheck."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4kit.config.loading import load_site
from dsv4kit.image import render, script
from dsv4kit.image.context import BuildContext
from dsv4kit.image.stack import stacks
from dsv4kit.launch.image_job import Job, batch_script

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
GIVEN = {"BASE_IMAGE": "base", "VERL_SHA": "a" * 40, "STACK_HASH": "0123456789ab", "KIT_REVISION": "1" * 40}
VARIANTS = [(hardware, name) for name, stack in stacks().items() for hardware in stack.hardware]


def build_script(hardware: str, stack: str | None = None) -> str:
    title = f"The image of {hardware}."
    return script.render(render.render(hardware, stack), GIVEN, "aarch64", title, f"localhost/dsv4kit-{hardware}:1")


def job_script(site: str) -> str:
    base = f"nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:{'0' * 64}"
    tag = "localhost/dsv4kit-gb200:pro-grpo-0123456789ab"
    context = BuildContext(Path("/c"), "gb200", "pro-grpo", "aarch64", "0123456789abcdef", tag, base, {})
    job = Job(Path("/home/me/.cache/dsv4kit/images/job-gb200-0123456789ab"), "", Path("/shared/images/gb200.sqsh"))
    return batch_script(context, job, load_site(site), "6:00:00", 40, ["/etc/pip.conf:/etc/pip.conf:ro"])


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def test_the_build_of_gb200(golden: Callable[[str, str], None]) -> None:
    golden("image-gb200.sh", build_script("gb200"))


def test_the_job_of_a_site(golden: Callable[[str, str], None]) -> None:
    golden("image-job.sbatch", job_script("example-gb200-pyxis"))


@pytest.mark.parametrize(("hardware", "stack"), VARIANTS)
def test_shellcheck_has_nothing_to_say_about_any_build(hardware: str, stack: str, tmp_path: Path) -> None:
    (tmp_path / "build.sh").write_text(build_script(hardware, stack))
    (tmp_path / "image.sbatch").write_text(job_script("example-h100-pyxis"))
    done = subprocess.run(
        [SHELLCHECK, "--shell=bash", tmp_path / "build.sh", tmp_path / "image.sbatch"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert subprocess.run(["bash", "-n", tmp_path / "build.sh"], capture_output=True).returncode == 0


def test_every_instruction_that_runs_is_a_step_and_every_variable_of_the_image_is_kept() -> None:
    text, dockerfile = build_script("gb200"), render.render("gb200")
    count = sum(line.startswith(("RUN ", "COPY ")) for line in dockerfile.splitlines())
    assert text.count("\nstep ") == count
    assert f"STEP $1/{count}: $2" in text
    variables = text[text.index("variables=(") :].partition(")")[0]
    for name in ("PATH", "LANG", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME", "CPATH"):
        assert name in variables
    # Of the stage that compiles, and of no other.
    assert "NVTE_CUDA_ARCHS" in text
    assert "NVTE_CUDA_ARCHS" not in variables
