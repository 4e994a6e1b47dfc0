"""What an image is built from: complete, the same whenever it is written, and nothing is written for a mistake."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4kit.errors import UserError
from dsv4kit.image.context import write_context

SHA = "0123456789" * 4
BASE = f"nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:{'ab' * 32}"
GIVEN = {"BASE_IMAGE": BASE, "VERL_SHA": SHA}


def files(directory: Path) -> dict[str, tuple[bytes, int, float]]:
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime)
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_everything_that_is_copied_is_there(tmp_path: Path) -> None:
    context = write_context("gb200", tmp_path / "context", GIVEN)
    there = files(context.directory)
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", context.dockerfile.read_text(), re.M):
        for name in source.split():
            assert any(file == name or file.startswith(f"{name}/") for file in there), name
    assert (context.architecture, context.stack, context.base_image) == ("aarch64", "pro-grpo", BASE)
    assert context.build_args["VERL_SHA"] == SHA
    assert context.tag == f"localhost/dsv4kit-gb200:pro-grpo-{context.stack_hash[:12]}"
    facts = json.loads(there["image.json"][0])
    assert facts["git"]["verl"] == SHA
    assert facts["stack_hash"] == context.stack_hash == context.build_args["STACK_HASH"]
    assert not any(name.endswith(".pyc") for name in there)
    assert "kit/dsv4kit/plugin/dsv4.py" in there


def test_the_kit_in_the_context_runs_by_itself(tmp_path: Path) -> None:
    kit = write_context("cpu", tmp_path, {"BASE_IMAGE": "localhost/base:1"}).directory / "kit"
    script = (
        "import dsv4kit, dsv4kit.image.manifest, dsv4kit.image.probes, dsv4kit.node.agent, submitit;"
        "from dsv4kit.verl_keys.chat_template import read; print(dsv4kit.__file__, submitit.__file__, bool(read("
        "'deepseek-v4-minimal')))"
    )
    environment = {"PYTHONPATH": str(kit), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, env=environment, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{kit}/dsv4kit/__init__.py", f"{kit}/submitit/__init__.py", "True"]


def test_written_twice_it_is_the_same_down_to_times_and_modes(tmp_path: Path) -> None:
    first, second = (write_context("cpu", tmp_path / n, {"BASE_IMAGE": "localhost/base:1"}) for n in "ab")
    assert files(first.directory) == files(second.directory)
    assert first.stack_hash == second.stack_hash


@pytest.mark.parametrize(
    "change",
    [{"VERL_SHA": SHA[::-1]}, {"BASE_IMAGE": BASE.replace("ab", "cd")}, {"STACK": "flash-sft", "VERL_SHA": ""}],
    ids=lambda change: next(iter(change)),
)
def test_the_hash_follows_what_is_inside(tmp_path: Path, change: dict[str, str]) -> None:
    before = write_context("h100", tmp_path / "a", GIVEN).stack_hash
    assert write_context("h100", tmp_path / "b", GIVEN | change).stack_hash != before


def test_the_hash_does_not_follow_how_it_is_built(tmp_path: Path) -> None:
    before = write_context("h100", tmp_path / "a", GIVEN)
    after = write_context("h100", tmp_path / "b", GIVEN | {"MAX_JOBS": "16"})
    assert before.stack_hash == after.stack_hash
    assert after.build_args["MAX_JOBS"] == "16"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"BASE_IMAGE": "", "VERL_SHA": "", "STACK": "flash-sft"}, r"BASE_IMAGE: not set; nvcr.io\S+@sha256:... is "),
        ({"BASE_IMAGE": "nvidia/cuda:13.0.2"}, r"BASE_IMAGE='nvidia/cuda:13.0.2': without a digest"),
        ({"BASE_IMAGE": "a b"}, "not the name of an image"),
        ({"VERL_SHA": ""}, r"VERL_SHA: not set; .*/verl that has 3dd97a0, 0bd668c.*image pins --hw h100` finds it"),
        ({"VERL_SHA": "main"}, r"VERL_SHA='main': not a full commit sha .*a branch moves"),
        ({"VERL_SHA": "0bd668c"}, r"VERL_SHA='0bd668c': not a full commit sha"),
        ({"VERL_SHA": SHA.upper().replace("1", "A")}, "not a full commit sha"),
        ({"MAX_JOBS": "all"}, r"MAX_JOBS='all': a number from 1 to 9999"),
        ({"BASE_IMAG": BASE}, r"BASE_IMAG: no build variable of stack pro-grpo; allowed: .*did you mean 'BASE_IMAGE'"),
        ({"TORCH_INDEX": "https://me:secret@host.invalid/simple"}, "TORCH_INDEX: an address without a user's name"),
        ({"STACK": "cpu"}, r"STACK='cpu': no stack of that name for HW=h100"),
        ({"STACK": "flash-sft"}, r"VERL_SHA: no build variable of stack flash-sft"),
    ],
)  # fmt: skip
def test_a_mistake_writes_nothing(tmp_path: Path, given: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        write_context("h100", tmp_path / "context", GIVEN | given)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)
    assert not (tmp_path / "context").exists()


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), shutil.Error([("a", "b", "No space left on device")])]
)
def test_nothing_is_left_of_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool, error: OSError
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(shutil, "copytree", full)
    directory = tmp_path / "context"
    if is_there:
        directory.mkdir()
    with pytest.raises(UserError, match=r"/context: No space left on device$"):
        write_context("cpu", directory, {"BASE_IMAGE": "localhost/base:1"})
    assert list(directory.iterdir()) == [] if is_there else not directory.exists()


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        write_context("cpu", tmp_path, {"BASE_IMAGE": "localhost/base:1"})
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
