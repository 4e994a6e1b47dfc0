"""Wheels of what is compiled: used again where everything that decides them is the same, and only whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4kit.config.loading import hardware_of
from dsv4kit.image import wheels
from dsv4kit.image.context import write_context
from dsv4kit.image.stack import stacks

BASE = f"nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:{'ab' * 32}"
GIVEN = {"BASE_IMAGE": BASE, "VERL_SHA": "a" * 40}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4KIT_CACHE", str(tmp_path / "cache"))


def keys(hardware: str = "h100", architecture: str = "x86_64", base: str = BASE) -> dict[str, wheels.Key]:
    return wheels.keys(stacks()["pro-grpo"], hardware_of(hardware), architecture, base)


def built(tmp_path: Path, name: str = "a-1-cp312-linux_x86_64.whl") -> Path:
    (tmp_path / name).write_bytes(b"compiled")
    return tmp_path / name


def test_every_compiled_thing_has_a_key_with_what_decides_it() -> None:
    found = keys()
    assert set(found) == {"packages", "flash-mla", "fast-hadamard-transform"}
    assert found["flash-mla"]["submodules"] == {"csrc/cutlass": "147f5673d0c1c3dcf66f78d677fd647e4a020219"}
    assert found["packages"]["versions"] == {"transformer-engine-torch": "2.17.1"}
    assert all(key["torch"] == "2.13.0" and key["nvcc"].startswith("13.0.") for key in found.values())
    assert wheels.keys(stacks()["cpu"], hardware_of("cpu"), "x86_64", "localhost/x:1") == {}


def test_what_was_kept_is_ready_for_the_same_and_for_nothing_else(tmp_path: Path) -> None:
    key = keys()["flash-mla"]
    assert wheels.ready(key) == []
    wheels.keep(key, [built(tmp_path)])
    assert [path.name for path in wheels.ready(key)] == ["a-1-cp312-linux_x86_64.whl"]
    others = [keys("b200"), keys(architecture="aarch64"), keys(base=BASE.replace("ab", "cd"))]
    assert [wheels.ready(other["flash-mla"]) for other in others] == [[], [], []]
    # H200 has the GPU of H100.
    assert wheels.ready(keys("h200")["flash-mla"]) == wheels.ready(key)
    for changed in (
        {"torch": "2.14.0"},
        {"source": "0" * 40},
        {"submodules": {"csrc/cutlass": "0" * 40}},
        {"nvcc": "13.1"},
    ):
        assert wheels.ready({**key, **changed}) == []


@pytest.mark.parametrize("damage", ["content", "gone", "record"])
def test_a_damaged_one_is_not_used(tmp_path: Path, damage: str) -> None:
    key = keys()["flash-mla"]
    place = wheels.keep(key, [built(tmp_path)])
    assert place is not None
    (wheel,) = wheels.ready(key)
    if damage == "content":
        wheel.write_bytes(b"compile")
    elif damage == "gone":
        wheel.unlink()
    else:
        (place / "key.json").write_text("[]")
    assert wheels.ready(key) == []


def test_of_none_nothing_is_kept() -> None:
    assert wheels.keep(keys()["flash-mla"], []) is None
    assert not wheels.directory().exists()


def test_a_context_brings_what_is_ready_and_names_what_is_not(tmp_path: Path) -> None:
    before = write_context("h100", tmp_path / "before", GIVEN)
    assert set(before.to_compile) == {"packages", "flash-mla", "fast-hadamard-transform"}
    wheels.keep(before.to_compile["flash-mla"], [built(tmp_path)])
    after = write_context("h100", tmp_path / "after", GIVEN)
    assert set(after.to_compile) == {"packages", "fast-hadamard-transform"}
    assert [path.name for path in (tmp_path / "after/wheels/flash-mla").glob("*.whl")] == ["a-1-cp312-linux_x86_64.whl"]
    assert before.stack_hash == after.stack_hash
