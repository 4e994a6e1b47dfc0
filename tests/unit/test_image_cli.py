"""`dsv4kit image show` and `render`: what they print, and how they say no."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from dsv4kit.cli import main
from dsv4kit.image.stack import stacks

SHA = "0123456789" * 4


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dsv4kit", "image", *words])
    return main.main()


@pytest.mark.parametrize("hardware", ["gb200", "gb300", "cpu"])
def test_show_has_every_pin_with_its_reason(
    hardware: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "show", hardware) == 0
    shown = capsys.readouterr().out
    stack = next(each for each in stacks().values() if f"stack {each.name}:" in shown.splitlines()[0])
    for name, package in stack.index.items():
        assert re.search(
            rf"^\w+ +{re.escape(name)} +{re.escape(package.version)}.* {re.escape(package.reason)}$", shown, re.M
        )
    for name, source in stack.git.items():
        assert re.search(
            rf"{name} +({source.sha}|{source.variable} has to say) +{re.escape(source.reason)}$", shown, re.M
        )
    assert stack.base.reason in shown


def test_show_for_programs_has_every_locked_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "show", "h100", "--stack=flash-sft", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["architecture"], shown["name"], shown["locked"]["ray"]) == ("x86_64", "flash-sft", "2.60.0")
    assert len(shown["locked"]) > 100
    assert shown["git"]["megatron-core"]["reason"]


def test_render_writes_a_context_and_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["render", "gb200", "--out", str(out), "--set", "BASE_IMAGE=localhost/cuda:1", "--set", f"VERL_SHA={SHA}"]
    assert run(monkeypatch, *words) == 0
    shown = capsys.readouterr().out
    assert f"--build-arg VERL_SHA={SHA}" in shown
    assert (out / "Dockerfile").read_text().startswith("# gb200, stack pro-grpo")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "h10"], "HW='h10': no such name; known: "),
        (["show", "cpu", "--stack=pro"], "STACK='pro': no stack of that name for HW=cpu; allowed: cpu"),
        (["render", "gb200", "--set", "VERL_SHA=x"], "goes with --out DIR"),
        (["render", "gb200", "--out", "{out}"], "VERL_SHA: not set"),
        (["render", "cpu", "--out", "{out}", "--set", "BASE"], "'BASE' is not of the form key=value"),
        (["render", "h100", "--out", "{out}", "--set", "STACK=flash"], "STACK='flash': no stack of that name"),
        (["import", "x", "--image=a\nb.sqsh"], "IMAGE='a\\nb.sqsh': control characters"),
        (["import", "--image={out}.sqsh", "--", "--all"], "'--all': not the name of an image"),
        (["import", "--image={out}.sqsh", ""], "'': not the name of an image"),
        (["rendr", "cpu"], "did you mean 'render'?"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert run(monkeypatch, *(word.format(out=out) for word in words)) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err
    assert not out.exists()


def test_the_command_that_is_printed_is_one_for_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my $(id)"
    index = "https://h/$(id);x"
    words = ["--set", "BASE_IMAGE=localhost/base:1", "--set", f"TORCH_INDEX={index}"]
    assert run(monkeypatch, "render", "cpu", "--out", str(out), *words) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:2] == ["docker", "build"]
    assert command[-1] == str(out)
    assert f"TORCH_INDEX={index}" in command


def test_a_link_that_leads_nowhere_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "x.sqsh"
    link.symlink_to(tmp_path / "gone" / "x.sqsh")
    assert run(monkeypatch, "import", "localhost/a:1", f"--image={link}") == 2
    assert "exists already" in capsys.readouterr().err
    assert link.is_symlink()
