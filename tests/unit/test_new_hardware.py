"""A new hardware is one file, and one row in each table of profiles: nothing else has to know of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from dsv4kit.cli import main
from dsv4kit.config import loading
from dsv4kit.config.paths import HERE, ROOT, SITES

PAGE = (ROOT / "docs" / "developing.md").read_text(encoding="utf-8")


def blocks(heading: str) -> list[str]:
    """The YAML blocks of one section of docs/developing.md."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [block.partition("```")[0] for block in section.split("```yaml\n")[1:]]


@pytest.fixture
def b400(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration with the hardware that docs/developing.md adds, exactly as it says."""
    for kind in ("bases", "hardware", "models", "profiles", "recipes"):
        shutil.copytree(HERE / kind, tmp_path / kind)
    hardware, row = blocks("A new hardware")
    (tmp_path / "hardware" / "b400.yaml").write_text(hardware)
    for name in ("pro-grpo", "flash-sft"):
        table = tmp_path / "profiles" / f"{name}.yaml"
        table.write_text(table.read_text() + (row if name == "pro-grpo" else "  b400: {}\n"))
    monkeypatch.setattr(loading, "HERE", tmp_path)
    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path / "runs"))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.run(words) == 0
    return capsys.readouterr().out


def test_it_is_listed_and_shown(b400: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = said(capsys, "profiles")
    assert "GRPO of dsv4-pro on 64 nodes of 8 B400" in listed
    assert "flash-sft-b400" in listed
    shown = json.loads(said(capsys, "profiles", "show", "pro-grpo-b400", "--json"))
    assert shown["settings"]["parallel"]["rollout"]["data_parallel_size"] == 2
    assert shown["sources"]["parallel.rollout.data_parallel_size"].endswith("profiles/pro-grpo.yaml: hardware.b400")
    assert shown["sources"]["parallel.actor.pipeline_parallel_size"].endswith("profiles/pro-grpo.yaml")
    assert shown["derived"]["nodes_multiple_of"] == 32
    assert 700 < shown["derived"]["min_memory_gib"] < 1000


@pytest.mark.parametrize("chosen", [[], ["--model", "dsv4-flash", "--recipe", "sft"]])
def test_it_is_planned_and_submitted(b400: Path, capsys: pytest.CaptureFixture[str], chosen: list[str]) -> None:
    plan = json.loads(said(capsys, "plan", "--hw", "b400", "--json", *chosen))
    assert plan["verdict"] == "fit"
    printed = said(capsys, "submit", "--hw", "b400", "--dry-run", "--run", "new", *chosen)
    assert "#SBATCH --nodes=" in printed
    node = yaml.safe_load(printed.partition("/node.json\n")[2])
    assert node["limits"]["min_memory_bytes"] > 50 * 2**30
    assert node["ray"]["gpus"] == 8


def test_what_it_has_no_row_for_is_one_line(b400: Path) -> None:
    with pytest.raises(loading.UserError, match=r"no profile for HW=b400 MODEL=dsv4-flash RECIPE=grpo; HW=b400 has: "):
        main.run(["plan", "--hw", "b400", "--model", "dsv4-flash", "--recipe", "grpo"])


def test_its_site_is_there() -> None:
    assert (SITES / f"{yaml.safe_load(blocks('A new hardware')[0])['defaults']['site']}.yaml").is_file()
