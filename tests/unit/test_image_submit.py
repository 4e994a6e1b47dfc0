"""IMAGE= from the command line to the script: how a site enters it, and what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4kit.cli import main
from dsv4kit.errors import UserError
from dsv4kit.image.manifest import FORMAT

ROOT = Path(__file__).parents[2]


class Image:
    """A file that a stand-in for unsquashfs finds a manifest in."""

    def __init__(self, root: Path) -> None:
        self.path, self.manifest = root / "x.sqsh", root / "manifest.json"
        self.path.write_bytes(b"hsqs" + bytes(92))
        tool = root / "bin" / "unsquashfs"
        tool.parent.mkdir()
        manifest = shlex.quote(str(self.manifest))
        tool.write_text(f'#!/bin/sh\n[ "$1 $3" = "-cat opt/dsv4kit/manifest.json" ] && cat {manifest}\n')
        tool.chmod(0o755)

    def has(self, **changes: Any) -> None:
        content = {"format": FORMAT, "hardware": "cpu", "features": {"verl": "0.9.1"}, "profiles": ["grpo-tiny-cpu"]}
        self.manifest.write_text(json.dumps({**content, **changes}))


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    made = Image(tmp_path)
    made.has()
    return made


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.run(["submit", "--run=r", "--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_a_site_without_containers_enters_it_by_bubblewrap(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--hw=cpu", f"--image={image.path}")
    assert f"/kit/dsv4kit/node/enter_image.sh {image.path} " in text
    assert "\n  python3 -u -m submitit" in text
    assert "not-installed-yet" in text  # its data is made inside it, once something is really submitted


def test_a_pyxis_site_takes_it_in_place_of_its_own(
    image: Image, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = yaml.safe_load((ROOT / "slurm" / "sites" / "example-h100-pyxis.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    image.has(hardware="h100", profiles=["pro-grpo-h100"])
    monkeypatch.chdir(tmp_path)
    text = shown(capsys, "--hw=h100", "--site=mine.yaml", "--image=x.sqsh", "--force")
    assert f"--container-image={image.path}" in text


def test_the_run_is_set_up_for_the_verl_inside(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    image.has(features={"verl": "main-2026-10"})
    shown(capsys, "--hw=cpu", f"--image={image.path}")
    with pytest.raises(UserError, match=r"its verl is main-2026-10, the run is set up for 0\.9\.1"):
        shown(capsys, "--hw=cpu", f"--image={image.path}", "--set=engine.verl=0.9.1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": "h100"}, "built for HW=h100, whose kernels cpu does not run"),
        ({"profiles": ["sft-tiny-cpu"]}, "it was built for sft-tiny-cpu, and not for grpo-tiny-cpu"),
        ({"features": {"verl": "nightly"}}, "engine.verl='nightly': unknown"),
        ({"format": 0}, "its manifest has format 0"),
    ],
)
def test_one_that_does_not_fit_is_refused(
    image: Image, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    image.has(**changes)
    with pytest.raises(UserError, match=message):
        shown(capsys, "--hw=cpu", f"--image={image.path}")


def test_one_that_was_made_without_the_kit_is_taken(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    image.manifest.unlink()
    assert "enter_image.sh" in shown(capsys, "--hw=cpu", f"--image={image.path}")


def test_one_that_is_not_there_or_not_whole_is_refused_in_a_dry_run_too(
    image: Image, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"^IMAGE: '.*/y.sqsh': No such file"):
        shown(capsys, "--hw=cpu", f"--image={image.path.with_name('y.sqsh')}")
    image.path.write_bytes(b"hsqs")
    with pytest.raises(UserError, match=r"^IMAGE: '.*/x.sqsh': cut short"):
        shown(capsys, "--hw=cpu", f"--image={image.path}")


@pytest.mark.parametrize(("name", "message"), [("x.tar", "not a squashfs file by its name"), ("", "")])
def test_names(image: Image, capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
    if message:
        with pytest.raises(UserError, match=f"IMAGE='{name}': {message}"):
            shown(capsys, "--hw=cpu", f"--image={name}")
    else:
        assert "enter_image.sh" not in shown(capsys, "--hw=cpu", f"--image={name}")
