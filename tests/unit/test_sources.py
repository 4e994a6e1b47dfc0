"""Checkouts of Megatron: how to get them, and one line for what is wrong with one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4kit.cli import main
from dsv4kit.errors import UserError
from dsv4kit.image import sources
from dsv4kit.image.stack import stacks

LM, BRIDGE = sources.CHECKOUTS
Make = Callable[[sources.Checkout], Path]


def git(path: Path, *words: str) -> str:
    own = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", path, *own, *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a checkout with V4's file in it, at the very commit that pro-grpo has."""

    def make(wanted: sources.Checkout) -> Path:
        path = tmp_path / wanted.variable
        (path / wanted.file).parent.mkdir(parents=True)
        (path / wanted.file).write_text("attention\n")
        git(path, "init", "-q")
        git(path, "add", ".")
        git(path, "commit", "-qm", "one")
        known = sources.stacks()
        stack = known["pro-grpo"]
        source = stack.git[wanted.package].model_copy(update={"sha": git(path, "rev-parse", "HEAD")})
        own = stack.model_copy(update={"git": {**stack.git, wanted.package: source}})
        monkeypatch.setattr(sources, "stacks", lambda: {**known, "pro-grpo": own})
        return path

    return make


def said(*words: str) -> str:
    with pytest.raises(UserError) as wrong:
        main.run(["sources", *words])
    return str(wrong.value)


def test_without_a_checkout_it_says_how_to_get_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["sources"]) == 0
    shown = capsys.readouterr().out
    for package in ("megatron-core", "megatron-bridge"):
        source = stacks()["pro-grpo"].git[package]
        assert f"{source.url} {source.sha}" in shown


def test_the_commands_are_ones_a_shell_runs() -> None:
    for name in ("pro-grpo", "flash-sft"):
        script = "\n".join(sources.commands(sources.stack_of(name)))
        assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0


def test_a_right_checkout_is_called_unchanged(checkout: Make, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkout(LM)
    assert main.run(["sources", f"--megatron-lm={path}"]) == 0
    assert "unchanged" in capsys.readouterr().out


def test_what_is_wrong_is_one_line(checkout: Make, tmp_path: Path) -> None:
    path = checkout(LM)
    assert said("--megatron-lm=/nowhere") == "MEGATRON_LM=/nowhere: no such directory"
    assert said(f"--megatron-bridge={path}") == f"MEGATRON_BRIDGE={path}: no {BRIDGE.file} in there, so no DeepSeek-V4"
    (path / LM.file).write_text("changed\n")
    assert said(f"--megatron-lm={path}").endswith(f"but changed: {LM.file}")
    git(path, "commit", "-qam", "two")
    assert "the stack has" in said(f"--megatron-lm={path}")
    assert "no stack with a Megatron of its own" in said("--stack=cpu")


def test_a_copy_without_git_is_not_believed(checkout: Make, tmp_path: Path) -> None:
    path = checkout(LM)
    (path / ".git").rename(tmp_path / "gone")
    assert "is no git checkout" in said(f"--megatron-lm={path}")


@pytest.mark.parametrize("missing", ["MEGATRON_LM", "MEGATRON_BRIDGE"])
def test_a_v4_run_without_a_checkout_is_refused_in_one_line(missing: str, checkout: Make) -> None:
    given = {wanted.variable: checkout(wanted) for wanted in sources.CHECKOUTS if wanted.variable != missing}
    words = [f"--{name.lower().replace('_', '-')}={path}" for name, path in given.items()]
    with pytest.raises(UserError) as refused:
        main.run(["submit", "--hw=cpu", "--model=dsv4-tiny", "--recipe=sft", *words])
    assert str(refused.value).startswith(f"{missing}: not set; dsv4-tiny needs a checkout of")
