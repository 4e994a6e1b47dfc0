"""The Dockerfiles: reviewed text, and what hadolint, shellcheck and the kit's own checks say about every variant."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4kit.config.paths import ROOT
from dsv4kit.image import checks, render
from dsv4kit.image.dockerfile import instructions
from dsv4kit.image.stack import stacks

BIN = Path(sys.executable).parent  # of the locked development environment
HADOLINT = [BIN / "hadolint", "--config", ROOT / "containers" / "hadolint.yaml", "--no-color", "-"]
VARIANTS = [(hardware, name) for name, stack in stacks().items() for hardware in stack.hardware]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


@pytest.mark.parametrize("hardware", ["b200", "cpu", "gb200", "gb300", "h100", "h200"])
def test_the_dockerfile_of_each_hardware(golden: Callable[[str, str], None], hardware: str) -> None:
    golden(f"dockerfiles/{hardware}.Dockerfile", render.render(hardware))


def test_the_other_stack_on_the_other_architecture(golden: Callable[[str, str], None]) -> None:
    golden("dockerfiles/h100-flash-sft.Dockerfile", render.render("h100", "flash-sft"))
    golden("dockerfiles/gb300-pro-grpo.Dockerfile", render.render("gb300", "pro-grpo"))


@pytest.mark.parametrize(("hardware", "stack"), VARIANTS)
def test_every_variant_passes_every_check(hardware: str, stack: str) -> None:
    text = render.render(hardware, stack)
    made = stacks()[stack]
    context = [*render.requirements_of(made), "kit/dsv4kit/__init__.py", "image.json", "wheels/packages/key.json"]
    context += [f"sources/{each.name}/sha" for each in made.repositories.values()]
    context += [f"wheels/{name}/key.json" for name, source in made.git.items() if source.role == "compile"]
    assert checks.problems(text, context) == []
    done = subprocess.run(HADOLINT, input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(("hardware", "stack"), [("gb200", "pro-grpo"), ("h100", "flash-sft"), ("cpu", "cpu")])
def test_shellcheck_has_nothing_to_say_about_what_runs(hardware: str, stack: str, tmp_path: Path) -> None:
    bodies = [found.text for found in instructions(render.render(hardware, stack)) if found.word == "RUN"]
    scripts = []
    for number, body in enumerate(bodies):
        scripts.append(tmp_path / f"{number}.sh")
        scripts[-1].write_text(f"#!/bin/sh\n{body.replace(chr(10), chr(92) + chr(10))}\n")
    done = subprocess.run([BIN / "shellcheck", "--shell=sh", *scripts], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    for script in scripts:
        assert subprocess.run(["sh", "-n", script], capture_output=True).returncode == 0


def test_hadolint_would_say_something(tmp_path: Path) -> None:
    planted = render.render("gb200").replace("FROM packages AS trainer", "FROM packages AS trainer\nWORKDIR here")
    done = subprocess.run(HADOLINT, input=planted, capture_output=True, text=True)
    assert done.returncode != 0
    assert "DL3000" in done.stdout


def test_shellcheck_would_say_something(tmp_path: Path) -> None:
    planted = render.render("gb200").replace('--detach "${VERL_SHA}"', "--detach ${VERL_SHA}", 1)
    body = next(found.text for found in instructions(planted) if "merge-base" in found.text)
    (tmp_path / "planted.sh").write_text(f"#!/bin/sh\n{body.replace(chr(10), chr(92) + chr(10))}\n")
    done = subprocess.run([BIN / "shellcheck", tmp_path / "planted.sh"], capture_output=True, text=True)
    assert "SC2086" in done.stdout
