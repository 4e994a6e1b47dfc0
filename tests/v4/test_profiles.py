"""The keys each profile gives Megatron, as composed: only width and depth are changed, and one step is made."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import tiny
import torch

from dsv4kit.config.loading import combinations, load_settings
from dsv4kit.verl_keys import overrides

pytestmark = pytest.mark.usefixtures("one_rank", "local", "cpu")

# Kernels that a CPU does not have; that Megatron knows the key is tested, the step is made without.
KERNELS = ("apply_dsa_kernel_fusion", "apply_rope_fusion", "use_fused_mhc")
# How many processes there are, and which holds what.
DEPTH = ("pipeline_model_parallel_layout",)


@cache
def keys(name: str) -> dict[str, Any]:
    """What the profile sets below `override_transformer_config`, and MTP."""
    combination = combinations()[name]
    settings = load_settings(combination["hardware"], combination["model"], combination["recipe"]).settings
    if settings.engine.backend != "megatron":
        return {}
    pairs = overrides.build(settings, run_name="r", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/k")
    found = {key.rpartition(".")[2]: value for key, value in pairs.items() if ".override_transformer_config." in key}
    return found | {"mtp_num_layers": 1 if settings.parallel.actor.mtp else None}


PROFILES = [name for name in sorted(combinations()) if keys(name)]
TRAINED: dict[str, float] = {}


@pytest.mark.parametrize("name", PROFILES)
def test_megatron_knows_every_key(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(type(tiny.config(dsa_indexer_loss_coeff=0.0)))}
    assert set(keys(name)) - fields == set()


@pytest.mark.parametrize("name", PROFILES)
def test_a_step_with_the_profiles_keys(name: str) -> None:
    fields = {key: value for key, value in keys(name).items() if key not in DEPTH}
    fields |= {key: False for key in KERNELS if key in fields}
    # Profiles that differ in hardware alone come to the same fields.
    same = repr(sorted(fields.items()))
    if same not in TRAINED:
        built = tiny.model(tiny.config(**fields))
        optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
        first = tiny.loss(built, tiny.packed())
        first.backward()
        optimizer.step()
        TRAINED[same] = first.item() - tiny.loss(built, tiny.packed()).item()
    assert TRAINED[same] > 0
