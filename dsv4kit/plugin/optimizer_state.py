"""Saving and loading the state of an offloaded optimizer works, also with parameters of several dtypes (fix C).

Defects of Megatron that stand in the way of `[model,optimizer,extra]`; which of them a version has differs, so each fix
first looks at what the installed code does with a small stand-in (docs/fixes/optimizer-state.md):

* `DistributedOptimizer` numbers the parameters of a group in the order of the gradient buffers, but lists the fp32 ones
  first. With both dtypes in one group, a parameter gets the state of another: an assertion when their sizes differ,
  silence when they are equal. `order_params`.
* `HybridDeviceOptimizer` (HDO) raises KeyError at a load as soon as one parameter has no fp32 copy beside it, or (newer
  versions) passes over such a parameter, whose host copy then never sees the loaded master. That is any parameter that
  is fp32 itself, and all of them without the precision-aware optimizer. `load_mixed_dtypes`.
* HDO allocates its state for a load by a step on random gradients, which under the precision-aware optimizer writes
  into the weights just loaded; and the default checkpoint format never hands the loaded masters on to the host copies.
  `sync_after_load`.
* The step count of that allocating step replaces the loaded one in the default format, so that Adam corrects for its
  start once more; the other format fails with KeyError. `keep_step`.
* HDO never steps an fp32 parameter that stays on the GPU (offload fraction below 1) under the precision-aware
  optimizer: it looks at `grad`, the gradient is in `decoupled_grad`. It has no state either then, so that no save is
  possible. `step_every_param`.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from dsv4kit.plugin.optimizer_probes import (
    fp32_gradient_arrives,
    master_arrives,
    state_is_its_own,
    step_count_stays,
)
from dsv4kit.plugin.patching import PatchResult, State, attribute, marked, original_of
from dsv4kit.plugin.resume_masters import is_offloaded


def order_params(module: ModuleType) -> PatchResult:
    """Parameters are numbered in the order they are listed in; on `megatron.core.optimizer.distrib_optimizer`."""
    optimizer = attribute(module, "DistributedOptimizer")
    original = attribute(optimizer, "__init__")
    if original_of(original) is not None:
        return PatchResult(State.APPLIED, "by an earlier call")
    evidence = ""
    try:
        if state_is_its_own(module):
            return PatchResult(State.NOT_NEEDED, "each parameter of a group of two dtypes has its own state")
    except Exception as error:
        # Applied all the same: it changes nothing where the numbers are right.
        evidence = f"the probe could not tell whether it is needed ({type(error).__name__}: {error})"

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if hasattr(self, "model_param_group_index_map"):
            self.model_param_group_index_map.update(_places(self))

    optimizer.__init__ = marked(init, original)
    return PatchResult(State.APPLIED, evidence)


def _places(one: Any) -> dict[Any, tuple[int, int]]:
    """Group and place of each model parameter, by the identity of what is stepped for it."""
    places: dict[Any, tuple[int, int]] = {}
    for index, group in enumerate(one.optimizer.param_groups):
        place = {id(stepped): order for order, stepped in enumerate(group["params"])}
        pairs = list(zip(one.model_fp32_groups[index], one.shard_fp32_groups[index], strict=True))
        float16 = (one.model_float16_groups, one.shard_float16_groups, one.shard_fp32_from_float16_groups)
        for model, shard, main in zip(*(groups[index] for groups in float16), strict=True):
            pairs.append((model, shard if main is None else main))
        places |= {model: (index, place[id(stepped)]) for model, stepped in pairs if id(stepped) in place}
    return places


def load_mixed_dtypes(module: ModuleType) -> PatchResult:
    """HDO takes loaded masters for fp32 parameters too; on `...optimizer.cpu_offloading.hybrid_optimizer`."""
    hdo = attribute(module, "HybridDeviceOptimizer")
    name = "_update_fp32_params_by_new_state"
    original = attribute(hdo, name)
    if original_of(original) is not None:
        return PatchResult(State.APPLIED, "by an earlier call")
    arrives, evidence = master_arrives(original)
    if arrives:
        return PatchResult(State.NOT_NEEDED, "every loaded master arrives")

    def update_masters_by_new_state(self: Any) -> None:
        if not self.param_update_in_fp32:
            return
        for param, state in self.state.items():
            # What the sub-optimizers step: the fp32 copy, else the host copy, else the parameter itself.
            inner = self.param_to_inner_param[param]
            master = state.get("master_param")
            if master is not None and master is not inner:
                inner.data.copy_(master)

    setattr(hdo, name, marked(update_masters_by_new_state, original))
    return PatchResult(State.APPLIED, evidence)


def sync_after_load(module: ModuleType) -> PatchResult:
    """Loaded masters reach HDO's copies and the weights; on `megatron.core.optimizer.distrib_optimizer`.

    It has no probe: handing masters over and weights after them a second time changes nothing.
    """
    optimizer = attribute(module, "DistributedOptimizer")
    original = attribute(optimizer, "load_state_dict")
    if original_of(original) is not None:
        return PatchResult(State.APPLIED, "by an earlier call")

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        inner: Any = getattr(self, "optimizer", None)
        with torch.no_grad():  # fp32 parameters are views of the weights, which may not be written with autograd on
            original(self, state_dict)
            # Without parameter state it was the call that only allocates; the one that loads follows.
            if is_offloaded(inner) and "param_state" in state_dict:
                inner._sync_hdo_state_to_sub_optimizers()
                for param, master in inner.param_to_inner_param.items():
                    if master is not param:
                        param.data.copy_(master)

    optimizer.load_state_dict = marked(load_state_dict, original)
    return PatchResult(State.APPLIED)


def keep_step(module: ModuleType) -> PatchResult:
    """Adam's step count comes from the parameter groups, as Megatron means it; on `...optimizer.distrib_optimizer`."""
    optimizer = attribute(module, "DistributedOptimizer")
    name = "_set_main_param_and_optimizer_states"
    original = attribute(optimizer, name)
    if original_of(original) is not None:
        return PatchResult(State.APPLIED, "by an earlier call")
    stays, evidence = step_count_stays(original)
    if stays:
        return PatchResult(State.NOT_NEEDED, "the step count of the parameter groups stays")

    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # Non-tensors are skipped there. One format has no step and fails, the other has the one in memory.
        tensors = {**tensors, "step": None}
        if is_offloaded(self.optimizer):
            # Nor has it the master of a main parameter on the GPU, which is its equal.
            tensors.setdefault("master_param", tensors.get("param"))
        original(self, model_param, tensors)

    setattr(optimizer, name, marked(set_states, original))
    return PatchResult(State.APPLIED, evidence)


def step_every_param(module: ModuleType) -> PatchResult:
    """HDO steps fp32 parameters on the GPU too; on `...optimizer.cpu_offloading.hybrid_optimizer`."""
    hdo = attribute(module, "HybridDeviceOptimizer")
    name = "_set_sub_optimizer_grads"
    original = attribute(hdo, name)
    if original_of(original) is not None:
        return PatchResult(State.APPLIED, "by an earlier call")
    arrives, evidence = fp32_gradient_arrives(original)
    if arrives:
        return PatchResult(State.NOT_NEEDED, "an fp32 parameter on the GPU gets its gradient")

    @functools.wraps(original)
    def set_sub_optimizer_grads(self: Any) -> None:
        original(self)
        for param, inner in self.param_to_inner_param.items():
            # Stepped in its own place, by an optimizer that looks at `grad` alone. Set also when there is none this
            # time: Megatron clears `decoupled_grad` only.
            if inner is param and hasattr(param, "decoupled_grad"):
                gradient = param.decoupled_grad
                param.grad = None if gradient is None else gradient.to(param.dtype)

    setattr(hdo, name, marked(set_sub_optimizer_grads, original))
    return PatchResult(State.APPLIED, evidence)
