"""What a model needs of Megatron, held against recorded names of three Megatrons and small packages made here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4kit.config.loading import combinations, load_settings
from dsv4kit.plugin import needs
from dsv4kit.verl_keys import overrides

DEV = ("fd1121b8", "43e45e13")
ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


def of_megatron(lines: list[str]) -> list[str]:
    return [line for line in lines if line.removeprefix("no module ").lower().startswith("megatron")]


def keys(name: str) -> list[str]:
    """What a profile sets in Megatron's configuration."""
    combination = combinations()[name]
    settings = load_settings(combination["hardware"], combination["model"], combination["recipe"]).settings
    pairs = overrides.build(settings, run_name="r", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/k")
    return [key.rpartition(".")[2] for key in pairs if ".override_transformer_config." in key]


@pytest.mark.parametrize("sha", DEV)
@pytest.mark.parametrize("name", [name for name in sorted(combinations()) if "tiny" not in name])
def test_every_key_of_every_profile_is_a_field_of_the_megatrons_that_have_v4(name: str, sha: str) -> None:
    combination = combinations()[name]
    inventory = needs.Recorded(DATA / f"megatron-{sha}.json")
    found = needs.missing(combination["model"], combination["recipe"], inventory, keys(name))
    assert of_megatron(found) == []


def test_the_newest_release_is_refused_with_the_reason() -> None:
    found = needs.missing("dsv4-pro", "grpo", needs.Recorded(DATA / "megatron-0.19.2.json"))
    assert any("has no field csa_compress_ratios (DeepSeek-V4 is on Megatron-LM's branch dev" in line for line in found)
    assert any("experimental_attention_variant cannot be 'dsv4_hybrid'" in line for line in found)
    assert any("has no get_dsv4_hybrid_module_spec_for_backend" in line for line in found)


def test_a_key_that_is_no_field_is_named() -> None:
    found = needs.missing("dsv4-pro", "grpo", needs.Recorded(DATA / "megatron-43e45e13.json"), ["use_fused_mhcc"])
    assert "Megatron's configuration has no field use_fused_mhcc, which the run sets" in found


def test_the_toy_model_needs_none_of_it() -> None:
    assert needs.missing("tiny", "grpo", needs.Installed([])) == []


def test_names_are_read_without_importing(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "models" / "deepseek_v4"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    source = """
from typing import Literal, Optional
import a_package_that_is_not_there
try:
    class Config:
        variant: Optional[Literal["one", "two"]] = None
        size: int = 1
except ImportError:
    def fallback(): ...
"""
    (tmp_path / "vllm" / "other.py").write_text(source)
    installed = needs.Installed([tmp_path])
    assert installed.module("vllm.models.deepseek_v4") == needs.Module()
    assert installed.module("vllm.nothing") is None
    assert installed.module("vllm.other") == needs.Module(
        ("Config", "fallback"), ("variant", "size"), {"variant": ("one", "two")}
    )


def test_it_answers_as_a_command() -> None:
    command = [sys.executable, "-m", "dsv4kit.plugin.needs", "dsv4-flash", "sft"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert "no module megatron.bridge.models.deepseek.deepseek_v4_bridge" in " ".join(found["missing"])
