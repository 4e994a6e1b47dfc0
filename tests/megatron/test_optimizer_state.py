"""Optimizer state through Megatron's own checkpoints: what an uninterrupted run has is what a resumed one has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer
from toy import LR, Trainer

from dsv4kit.plugin import optimizer_state
from dsv4kit.plugin.fidelity import FidelityError
from dsv4kit.plugin.fidelity_hooks import refuse_unloadable
from dsv4kit.plugin.megatron_optimizer import clipping_per_dtype, grad_norm_per_dtype, no_grad_main_params
from dsv4kit.plugin.optimizer_probes import master_arrives, state_is_its_own
from dsv4kit.plugin.patching import PatchResult, State

pytestmark = pytest.mark.usefixtures("one_rank", "gpu")

# The fp32 parameter comes first and is a third of all: at 0.25 it alone is offloaded, at 0 none is.
KINDS = [(aware, offload) for aware in (False, True) for offload in (1.0, 0.25, 0.0)]
IDS = [f"{'aware ' if aware else ''}{offload:g} offloaded" for aware, offload in KINDS]
DEFAULT = "dp_reshardable"


@pytest.fixture(autouse=True)
def as_on_a_gpu(upstream: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Transformer Engine installed Megatron takes other branches; offloaded optimizers do not use the library."""
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    no_grad_main_params(distrib_optimizer)
    grad_norm_per_dtype(clip_grads)
    clipping_per_dtype(clip_grads)


PATCHES: dict[str, tuple[Callable[[Any], PatchResult], Any]] = {
    "order": (optimizer_state.order_params, distrib_optimizer),
    "dtypes": (optimizer_state.load_mixed_dtypes, hybrid_optimizer),
    "count": (optimizer_state.keep_step, distrib_optimizer),
    "sync": (optimizer_state.sync_after_load, distrib_optimizer),
    "step": (optimizer_state.step_every_param, hybrid_optimizer),
}


def _apply(*names: str) -> None:
    for name in names:
        function, module = PATCHES[name]
        assert function(module).state in (State.APPLIED, State.NOT_NEEDED)


# What the Megatron under test does by itself: 0.19.2 and fd1121b8 have both defects in their loud form.
ORDERED = state_is_its_own(distrib_optimizer)
RAISES = "KeyError" in master_arrives(hybrid_optimizer.HybridDeviceOptimizer._update_fp32_params_by_new_state)[1]
numbers_wrongly = pytest.mark.skipif(ORDERED, reason="this Megatron numbers parameters as it lists them")
raises = pytest.mark.skipif(not RAISES, reason="this Megatron passes over parameters without an fp32 copy")


def _run(path: Path, aware: bool, offload: float, sharding: str, mixed: bool = True) -> tuple[Trainer, Trainer]:
    """Three steps and a save; and a second process that loads it."""
    first = Trainer(aware=aware, offload=offload, mixed=mixed)
    for step in range(3):
        first.step(0.5 + step)
    first.save(path / "ckpt", sharding)
    refuse_unloadable(path / "ckpt")
    second = Trainer(aware=aware, offload=offload, mixed=mixed)
    second.load(path / "ckpt", sharding)
    return first, second


def _resumes_equal(aware: bool, offload: float, sharding: str, path: Path) -> None:
    _apply(*PATCHES)
    try:
        straight, resumed = _run(path, aware, offload, sharding)
    except FidelityError as refused:
        if sharding == DEFAULT:
            raise
        pytest.skip(f"refused: {refused}")
    assert resumed.weights() == straight.weights()
    assert resumed.moments() == straight.moments()
    for gradient in (3.0, -1.0):
        straight.step(gradient)
        resumed.step(gradient)
        assert resumed.weights() == straight.weights()
        assert resumed.moments() == straight.moments()


@pytest.mark.parametrize("sharding", [DEFAULT, "fully_reshardable"])
@pytest.mark.parametrize(("aware", "offload"), KINDS, ids=IDS)
def test_resumed_and_uninterrupted_runs_are_equal(aware: bool, offload: float, sharding: str, tmp_path: Path) -> None:
    _resumes_equal(aware, offload, sharding, tmp_path)


def _as_in_43e45e13() -> None:
    """How that commit behaves, written by hand: numbers that follow the lists, and a load that passes over fp32."""
    optimizer, hdo = distrib_optimizer.DistributedOptimizer, hybrid_optimizer.HybridDeviceOptimizer
    original = vars(optimizer)["__init__"]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for index, group in enumerate(zip(self.model_fp32_groups, self.model_float16_groups, strict=True)):
            for order, param in enumerate([*group[0], *group[1]]):
                self.model_param_group_index_map[param] = (index, order)

    def pass_over_fp32(self: Any) -> None:
        for param, state in self.state.items() if self.param_update_in_fp32 else ():
            if (copy := self.param_to_fp32_param.get(param)) is not None:
                copy.data.copy_(state["master_param"])

    optimizer.__init__ = init
    hdo._update_fp32_params_by_new_state = pass_over_fp32


@pytest.mark.parametrize("sharding", [DEFAULT, "fully_reshardable"])
@pytest.mark.parametrize(("aware", "offload"), KINDS, ids=IDS)
def test_they_are_equal_where_upstream_numbers_rightly_and_passes_over(
    aware: bool, offload: float, sharding: str, tmp_path: Path
) -> None:
    _as_in_43e45e13()
    assert optimizer_state.order_params(distrib_optimizer).state is State.NOT_NEEDED
    needed = optimizer_state.load_mixed_dtypes(hybrid_optimizer)
    assert (needed.state, needed.detail) == (State.APPLIED, "upstream's own leaves 2 of 3 masters behind")
    _resumes_equal(aware, offload, sharding, tmp_path)


def test_a_resume_is_silently_wrong_where_masters_are_passed_over(tmp_path: Path) -> None:
    """No exception anywhere, other weights after the first step: why the probe looks at the masters."""
    _as_in_43e45e13()
    _apply("count", "sync", "step")
    straight, resumed = _run(tmp_path, True, 1.0, DEFAULT)
    straight.step(3.0)
    resumed.step(3.0)
    assert resumed.weights() != straight.weights()


def test_numbers_that_are_right_are_left_alone() -> None:
    """Where the probe cannot tell, the patch is applied, and still changes nothing that is right."""
    _as_in_43e45e13()
    plain = Trainer(aware=True, offload=1.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizer_state, "state_is_its_own", lambda _module: 1 / 0)
        outcome = optimizer_state.order_params(distrib_optimizer)
    assert outcome.state is State.APPLIED
    assert "could not tell whether it is needed (ZeroDivisionError" in outcome.detail
    ordered = Trainer(aware=True, offload=1.0)
    maps = [list(trainer.megatron.model_param_group_index_map.values()) for trainer in (plain, ordered)]
    assert maps[0] == maps[1]


@numbers_wrongly
@pytest.mark.parametrize(("aware", "offload"), [(False, 1.0), (True, 1.0)], ids=["offloaded", "aware offloaded"])
def test_upstream_mixes_up_parameters_of_two_dtypes(aware: bool, offload: float, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"torch.Size\(\[16\]\), 0, 32"):
        _run(tmp_path, aware, offload, DEFAULT)


@raises
@pytest.mark.parametrize("aware", [False, True])
def test_upstream_cannot_load_fp32_parameters(aware: bool, tmp_path: Path) -> None:
    _apply("order")
    with pytest.raises(KeyError):
        _run(tmp_path, aware, 1.0, DEFAULT)


@raises
def test_upstream_cannot_load_any_without_the_precision_aware_optimizer(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        _run(tmp_path, False, 1.0, DEFAULT, mixed=False)


def test_upstream_fails_on_the_step_count_in_the_other_format(tmp_path: Path) -> None:
    _apply("order", "dtypes", "sync", "step")
    # Where the format cannot even be read, that is said at the save.
    with pytest.raises((KeyError, FidelityError), match=r"step|never loaded"):
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
    trainer = Trainer(aware=True, offload=0.0)
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
def test_decided_once(name: str) -> None:
    function, module = PATCHES[name]
    first = function(module)
    before = {place: vars(place[0])[place[1]] for place in __import__("toy").patched_places()}
    again = function(module)
    assert again.state is first.state
    assert first.state is State.NOT_NEEDED or again.detail == "by an earlier call"
    assert all(vars(place[0])[place[1]] is value for place, value in before.items())


def test_the_load_is_left_alone_where_upstream_hands_every_master_on() -> None:
    hdo = hybrid_optimizer.HybridDeviceOptimizer

    def fixed(self: Any) -> None:
        for param, state in self.state.items():
            self.param_to_inner_param[param].data.copy_(state["master_param"])

    hdo._update_fp32_params_by_new_state = fixed
    assert optimizer_state.load_mixed_dtypes(hybrid_optimizer).state is State.NOT_NEEDED
    assert hdo._update_fp32_params_by_new_state is fixed


def test_what_upstream_mends_itself_is_left_alone() -> None:
    optimizer, hdo = distrib_optimizer.DistributedOptimizer, hybrid_optimizer.HybridDeviceOptimizer
    set_states = vars(optimizer)["_set_main_param_and_optimizer_states"]
    set_grads = vars(hdo)["_set_sub_optimizer_grads"]

    def without_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {**tensors, "step": None})

    def with_fp32(self: Any) -> None:
        set_grads(self)
        for param in self.param_to_inner_param:
            param.grad = param.decoupled_grad.float()

    optimizer._set_main_param_and_optimizer_states = without_step
    hdo._set_sub_optimizer_grads = with_fp32
    assert optimizer_state.keep_step(distrib_optimizer).state is State.NOT_NEEDED
    assert optimizer_state.step_every_param(hybrid_optimizer).state is State.NOT_NEEDED


def test_a_format_that_can_be_written_and_not_read_is_refused_at_the_save(tmp_path: Path) -> None:
    """As Megatron-LM fd1121b8 writes `fully_reshardable`: the optimizer's classes among the non-tensors."""
    (tmp_path / "optimizer").mkdir()
    torch.save({"param_groups": [{"cpu_optimizer_cls": torch.optim.AdamW}]}, tmp_path / "optimizer" / "common.pt")
    with pytest.raises(FidelityError, match=r"torch.optim.adamw.AdamW in .*common.pt.*dist_ckpt_optim_fully_reshard"):
        refuse_unloadable(tmp_path)
    torch.save({"step": 3}, tmp_path / "optimizer" / "common.pt")
    refuse_unloadable(tmp_path)
