"""The checks at the end of an image's build, against the real verl."""

import json
from pathlib import Path
from typing import Any

import pytest
from warm_python import WarmPython

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("probes")
    environment = {"PYTHONPATH": str(REPOSITORY), "DSV4KIT_CACHE": str(out / "cache")}
    ran = warm.run(Path(__file__).with_name("probe_image.py"), out / "found.json", env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: dict[str, Any] = json.loads((out / "found.json").read_text())
    return answer


def test_p6_the_verl_inside_is_told_from_others(found: dict[str, Any]) -> None:
    assert found["features"]["0.9.1"] == []
    older = " ".join(found["features"]["main-2026-08"])
    assert "no key actor_rollout_ref.actor.megatron.grad_offload, and main-2026-08 has it" in older
    assert "trainer.checkpoint_callback_class" in older
    assert "set_default_vllm_quantization_backends (#8308) is not there" in " ".join(found["features"]["main-2026-10"])


def test_every_profile_of_a_hardware_fits_the_verl_inside(found: dict[str, Any]) -> None:
    assert found["profiles"]["cpu"] == [["grpo-tiny-cpu", "sft-dsv4-tiny-cpu", "sft-tiny-cpu"], []]
    checked, wrong = found["profiles"]["sft"]
    assert ("flash-sft-gb300" in checked, wrong) == (True, [])
    checked, wrong = found["profiles"]["grpo"]
    assert ({"pro-grpo-h200", "flash-grpo-h200"} <= set(checked), wrong) == (True, [])


def test_a_profile_that_does_not_fit_is_named_with_its_key(found: dict[str, Any]) -> None:
    _, wrong = found["profiles"]["another verl"]
    assert any("flash-sft-gb300: " in problem and "engine.grad_offload" in problem for problem in wrong)
