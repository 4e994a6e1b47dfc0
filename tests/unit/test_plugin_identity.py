"""Seeds, ids and order of the deterministic mode (no torch, no verl)."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4kit.plugin.identity import DispatchOrderUuid, sample_seed, trajectory_order

BASE: dict[str, Any] = {
    "base": 0,
    "step": 3,
    "index": 7,
    "sample": 1,
    "messages": [{"role": "user", "content": "What is 1 + 2?"}],
}


def test_the_same_sample_has_the_same_seed_in_every_process() -> None:
    code = f"from dsv4kit.plugin.identity import sample_seed; print(sample_seed(**{BASE!r}))"
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)}
        shown = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
        )
        assert int(shown.stdout) == sample_seed(**BASE)


@pytest.mark.parametrize(
    "change",
    [
        {"base": 1},
        {"step": 4},
        {"index": 8},
        {"sample": 2},
        {"messages": [{"role": "user", "content": "What is 1 + 3?"}]},
        {"messages": [{"role": "system", "content": "What is 1 + 2?"}]},
        {"messages": [*BASE["messages"], {"role": "assistant", "content": ""}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_anything_that_tells_samples_apart_changes_the_seed(change: dict[str, object]) -> None:
    assert sample_seed(**{**BASE, **change}) != sample_seed(**BASE)


def test_no_two_of_many_samples_share_a_seed() -> None:
    grid = itertools.product(range(20), range(20), range(16))
    seeds = {sample_seed(0, step, index, sample, []) for step, index, sample in grid}
    assert len(seeds) == 20 * 20 * 16


@given(st.text(), st.integers(-(2**40), 2**40))
def test_every_prompt_gets_a_seed_that_vllm_takes(text: str, index: int) -> None:
    assert 0 <= sample_seed(0, 1, index, 0, [{"role": "user", "content": text}]) < 2**63


def test_ids_sort_in_the_order_of_dispatch_and_carry_no_separator() -> None:
    ids = DispatchOrderUuid()
    made = [str(ids.uuid4()) for _ in range(1200)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)
    assert not any("_" in one for one in made)


def test_trajectories_sort_by_number() -> None:
    ordered = [
        f"prompt{uid:012d}_{session}_{output}" for uid in (1, 2, 10) for session in (0, 2, 11) for output in (0, 1)
    ]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    assert sorted(shuffled, key=trajectory_order) == ordered
    # The trainer's own ids where another run mode made them, and markers of whole prompts.
    assert trajectory_order("3f0c-11") < trajectory_order("3f0c-11_0_0")
