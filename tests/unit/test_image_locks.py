"""The images' locks match the stacks they were made from, name everything by hash, and nothing by address."""

import re
from pathlib import Path

import pytest

from dsv4kit.errors import UserError
from dsv4kit.image import locks
from dsv4kit.image.stack import NOT_ON_THE_INDEX, WITHOUT_V4, Package, Stack, canonical, stacks

LOCKED = [(name, arch) for name, stack in stacks().items() if stack.index for arch in locks.ARCHITECTURES]


def grpo(**update: object) -> Stack:
    return stacks()["pro-grpo"].model_copy(update=update)


@pytest.mark.parametrize(("name", "architecture"), LOCKED)
def test_the_lock_is_that_of_the_stack_of_now(name: str, architecture: str) -> None:
    stack = stacks()[name]
    text = locks.read(stack, architecture)
    assert locks.problems(text) == []
    found = {package: entry.splitlines()[0].rstrip(" \\") for package, entry in locks.entries(text)}
    for wanted, package in stack.index.items():
        if package.role != "dependencies":
            assert found[canonical(wanted)] == f"{canonical(wanted)}=={package.version}"
    for name in (*stack.never, *(key for key, each in stack.index.items() if each.role == "dependencies")):
        assert canonical(name) not in found


def test_both_architectures_have_the_same_versions() -> None:
    for name in {name for name, _ in LOCKED}:
        versions = [
            [entry.splitlines()[0] for _, entry in locks.entries(locks.read(stacks()[name], architecture))]
            for architecture in locks.ARCHITECTURES
        ]
        assert versions[0] == versions[1]


@pytest.mark.parametrize(
    "update",
    [
        {"index": {**stacks()["pro-grpo"].index, "vllm": Package(version="0.30.0", reason="newer")}},
        {"overrides": {}},
        {"caps": {}},
        {"never": {}},
        {"python": "3.11"},
        {"metadata": {}},
    ],
    ids=lambda update: next(iter(update)),
)
def test_a_lock_that_no_longer_matches_is_refused(update: dict[str, object]) -> None:
    stale = "pro-grpo.x86_64.lock: not made from what containers/stack.yaml says now about pro-grpo; `make lock`"
    with pytest.raises(UserError, match=re.escape(stale)):
        locks.read(grpo(**update), "x86_64")


def test_what_a_lock_is_not_made_from_does_not_make_it_stale() -> None:
    assert locks.read(grpo(description="another", hardware=["h100"], git={}), "x86_64")


def test_a_missing_lock_is_one_line() -> None:
    with pytest.raises(UserError, match=r"containers/locks/other.x86_64.lock: No such file or directory; `make lock`"):
        locks.read(grpo(name="other"), "x86_64")


def test_the_parts_are_the_lock_and_come_in_the_order_they_are_needed() -> None:
    text = locks.read(grpo(), "aarch64")
    parts = locks.split(grpo(), text)
    assert sorted("".join(parts.values()).splitlines()) == sorted(
        line for line in text.splitlines() if not line.startswith("#")
    )
    names = {file: {name for name, _ in locks.entries(part)} for file, part in parts.items()}
    assert names["build.txt"] == {"ninja", "packaging", "pybind11", "setuptools", "wheel"}
    assert names["compiled.txt"] == {"transformer-engine-torch"}
    assert {"torch", "triton", "transformer-engine-cu13", "nvidia-cudnn-cu13"} <= names["compile_with.txt"]
    assert {"vllm", "ray", "wandb"} <= names["packages.txt"]


@pytest.mark.parametrize(("name", "architecture"), LOCKED)
@pytest.mark.parametrize("package", WITHOUT_V4)
def test_no_lock_has_the_release_of_megatron_that_knows_no_dsv4(name: str, architecture: str, package: str) -> None:
    text = locks.read(stacks()[name], architecture)
    assert package not in {found for found, _ in locks.entries(text)}
    planted = f"{text}{package.replace('-', '_')}==0.19.2 \\\n    --hash=sha256:{'0' * 64}\n"
    assert any("has no DeepSeek-V4" in problem for problem in locks.problems(planted))


@pytest.mark.parametrize("name", NOT_ON_THE_INDEX)
def test_a_name_that_means_something_else_on_the_index_is_never_installed_from_it(name: str) -> None:
    planted = f"{name}==1.0.0 \\\n    --hash=sha256:{'0' * 64}\n"
    assert any("something else" in problem for problem in locks.problems(planted))
    spelt = name.replace("-", "_").upper()
    assert any("something else" in problem for problem in locks.problems(planted.replace(name, spelt, 1)))


def test_a_lock_without_hashes_versions_or_with_an_address_is_refused(tmp_path: Path) -> None:
    good = f"torch==2.13.0 \\\n    --hash=sha256:{'0' * 64}\n"
    assert locks.problems(good) == []
    assert locks.problems("torch==2.13.0\n") == ["torch: no hash"]
    assert locks.problems(good.replace("==", ">=")) == ["torch: no exact version"]
    assert "an address" in locks.problems(f"--index-url https://host.invalid\n{good}")[0]


def test_a_resolver_without_a_solution_is_one_line_and_the_lock_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "DIRECTORY", tmp_path)
    (tmp_path / "pro-grpo.x86_64.lock").write_text("as it was\n")
    (tmp_path / "uv").write_text("#!/bin/sh\necho 'no solution: a>1' >&2\necho '  and b<1' >&2\nexit 1\n")
    (tmp_path / "uv").chmod(0o755)
    with pytest.raises(UserError, match=r"pro-grpo for x86_64: no solution: a>1 and b<1"):
        locks.make(grpo(), "x86_64", str(tmp_path / "uv"))
    assert (tmp_path / "pro-grpo.x86_64.lock").read_text() == "as it was\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pro-grpo.x86_64.lock", "uv"]


def test_a_damaged_lock_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "DIRECTORY", tmp_path)
    monkeypatch.setattr(locks, "ROOT", tmp_path)
    locks.path(grpo(), "x86_64").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"^pro-grpo.x86_64.lock: damaged; `make lock` makes it again"):
        locks.read(grpo(), "x86_64")
