"""Optimizer state through Megatron's own checkpoints: what an uninterrupted run has is what a resumed one has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer
from toy import LR, Trainer

from dsv4kit.plugin import optimizer_state
from dsv4kit.plugin.megatron_optimizer import clipping_per_dtype, grad_norm_per_dtype, no_grad_main_params
from dsv4kit.plugin.patching import Outcome, State

pytestmark = pytest.mark.usefixtures("one_rank", "gpu")

KINDS = [(False, 1.0), (False, 0.5), (True, 1.0), (True, 0.5)]
IDS = ["offloaded", "half offloaded", "aware offloaded", "aware half offloaded"]
DEFAULT = "dp_reshardable"


@pytest.fixture(autouse=True)
def as_on_a_gpu(upstream: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Transformer Engine installed Megatron takes other branches; offloaded optimizers do not use the library."""
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    no_grad_main_params(distrib_optimizer)
    grad_norm_per_dtype(clip_grads)
    clipping_per_dtype(clip_grads)


PATCHES: dict[str, tuple[Callable[[Any], Outcome], Any]] = {
    "order": (optimizer_state.order_params, distrib_optimizer),
    "dtypes": (optimizer_state.load_mixed_dtypes, hybrid_optimizer),
    "count": (optimizer_state.keep_step, distrib_optimizer),
    "sync": (optimizer_state.sync_after_load, distrib_optimizer),
    "step": (optimizer_state.step_every_param, hybrid_optimizer),
}


def _apply(*names: str) -> None:
    for name in names:
        function, module = PATCHES[name]
        assert function(module).state is State.APPLIED


def _run(path: Path, aware: bool, offload: float, sharding: str, mixed: bool = True) -> tuple[Trainer, Trainer]:
    """Three steps and a save; and a second process that loads it."""
    first = Trainer(aware=aware, offload=offload, mixed=mixed)
    for step in range(3):
        first.step(0.5 + step)
    first.save(path / "ckpt", sharding)
    second = Trainer(aware=aware, offload=offload, mixed=mixed)
    second.load(path / "ckpt", sharding)
    return first, second


@pytest.mark.parametrize("sharding", [DEFAULT, "fully_reshardable"])
@pytest.mark.parametrize(("aware", "offload"), KINDS, ids=IDS)
def test_resumed_and_uninterrupted_runs_are_equal(aware: bool, offload: float, sharding: str, tmp_path: Path) -> None:
    _apply(*PATCHES)
    straight, resumed = _run(tmp_path, aware, offload, sharding)
    assert resumed.weights() == straight.weights()
    assert resumed.moments() == straight.moments()
    for gradient in (3.0, -1.0):
        straight.step(gradient)
        resumed.step(gradient)
        assert resumed.weights() == straight.weights()
        assert resumed.moments() == straight.moments()


@pytest.mark.parametrize(("aware", "offload"), [(False, 1.0), (True, 1.0)], ids=["offloaded", "aware offloaded"])
def test_upstream_mixes_up_parameters_of_two_dtypes(aware: bool, offload: float, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"torch.Size\(\[16\]\), 0, 32"):
        _run(tmp_path, aware, offload, DEFAULT)


@pytest.mark.parametrize("aware", [False, True])
def test_upstream_cannot_load_fp32_parameters(aware: bool, tmp_path: Path) -> None:
    _apply("order")
    with pytest.raises(KeyError):
        _run(tmp_path, aware, 1.0, DEFAULT)


def test_upstream_cannot_load_any_without_the_precision_aware_optimizer(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        _run(tmp_path, False, 1.0, DEFAULT, mixed=False)


def test_upstream_fails_on_the_step_count_in_the_other_format(tmp_path: Path) -> None:
    _apply("order", "dtypes", "sync", "step")
    with pytest.raises(KeyError, match="step"):
        _run(tmp_path, False, 1.0, "fully_reshardable")


def test_upstream_writes_into_the_loaded_weights(tmp_path: Path) -> None:
    """The allocating step puts the base model (give or take one random update) where the loaded weights were."""
    _apply("order", "dtypes")
    straight, resumed = _run(tmp_path, True, 1.0, DEFAULT)
    assert straight.weights() == {"layer": 0.99609375, "router": pytest.approx(1.0 - 3 * LR)}
    assert resumed.weights() == {"layer": 1.0, "router": pytest.approx(1.0, abs=1.5 * LR)}
    # And Adam counts the allocating step, not those of the checkpoint.
    assert {step for _, step, *_ in resumed.moments()} == {1.0}
    assert {step for _, step, *_ in straight.moments()} == {3.0}


def test_upstream_never_steps_an_fp32_parameter_on_the_gpu() -> None:
    _apply("order")
    trainer = Trainer(aware=True, offload=0.5)
    trainer.step()
    assert trainer.weights()["router"] == 1.0
    _apply("step")
    for done in (1, 2):
        trainer.step()
        assert trainer.weights()["router"] == pytest.approx(1.0 - done * LR, abs=LR / 10)
    # A step without its gradient leaves it alone: no stale one is used again.
    trainer.optimizer.zero_grad()
    trainer.megatron.optimizer.step()
    assert trainer.weights()["router"] == pytest.approx(1.0 - 2 * LR, abs=LR / 10)


def test_homogeneous_groups_keep_their_order() -> None:
    plain = Trainer(aware=True, offload=1.0, mixed=False)
    order = [p.numel() for g in plain.megatron.optimizer.param_groups for p in g["params"]]
    _apply("order")
    ordered = Trainer(aware=True, offload=1.0, mixed=False)
    assert [p.numel() for g in ordered.megatron.optimizer.param_groups for p in g["params"]] == order


@pytest.mark.parametrize("name", PATCHES)
def test_applied_once(name: str) -> None:
    function, module = PATCHES[name]
    assert function(module).state is State.APPLIED
    before = {place: vars(place[0])[place[1]] for place in __import__("toy").patched_places()}
    assert function(module).detail == "by an earlier call"
    assert all(vars(place[0])[place[1]] is value for place, value in before.items())


def test_the_load_is_left_alone_where_upstream_accepts_fp32_parameters() -> None:
    hdo = hybrid_optimizer.HybridDeviceOptimizer

    def fixed(self: Any) -> None:
        for param, state in self.state.items():
            if param in self.param_to_fp32_param:
                self.param_to_fp32_param[param].data.copy_(state["master_param"])

    hdo._update_fp32_params_by_new_state = fixed
    assert optimizer_state.load_mixed_dtypes(hybrid_optimizer).state is State.NOT_NEEDED
    assert hdo._update_fp32_params_by_new_state is fixed
