"""Saving and loading the state of an offloaded optimizer works, also with parameters of several dtypes (fix C).

Defects of megatron-core 0.19.2 that stand in the way of `[model,optimizer,extra]` (docs/fixes/optimizer-state.md):

* `DistributedOptimizer` numbers the parameters of a group in the order of the gradient buffers, but lists the fp32 ones
  first. With both dtypes in one group, a parameter gets the state of another: an assertion when their sizes differ,
  silence when they are equal. `order_params`.
* `HybridDeviceOptimizer` (HDO) raises KeyError at a load as soon as one parameter has no fp32 copy beside it, which is
  any parameter that is fp32 itself, and all of them without the precision-aware optimizer. `load_mixed_dtypes`.
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

from dsv4kit.plugin.patching import Outcome, PatchError, State, attribute, marked, original_of
from dsv4kit.plugin.resume_masters import is_offloaded

_BUILD = "_build_model_and_main_param_groups"


def order_params(module: ModuleType) -> Outcome:
    """Parameters are listed in the order they are numbered in; on `megatron.core.optimizer.distrib_optimizer`."""
    optimizer = attribute(module, "DistributedOptimizer")
    bound = attribute(optimizer, _BUILD)
    if not isinstance(bound, classmethod):
        raise PatchError(f"{_BUILD} is a {type(bound).__name__}, no classmethod")
    original = bound.__func__
    if getattr(original, "_dsv4kit_ordered", False):
        return Outcome(State.APPLIED, "by an earlier call")

    @functools.wraps(original)
    def build(cls: Any, gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, config: Any) -> Any:
        groups = original(cls, gbuf_ranges, param_gbuf_map, opt_group_ranges, config)
        float16, float32, float16_shards, float32_shards, mains = groups
        for i, group in enumerate(opt_group_ranges):
            stepped = dict(zip(float32[i], float32_shards[i], strict=True))
            for model, shard, main in zip(float16[i], float16_shards[i], mains[i], strict=True):
                stepped[model] = shard if main is None else main
            listed = group["orig_group"]["params"]
            ordered = [stepped[param] for param in group["params"]]
            # Anything else is not the defect known here, and is left as it is.
            if {id(p) for p in listed} == {id(p) for p in ordered}:
                group["orig_group"]["params"] = ordered
        return groups

    build._dsv4kit_ordered = True  # type: ignore[attr-defined]
    setattr(optimizer, _BUILD, classmethod(build))
    return Outcome(State.APPLIED)


def load_mixed_dtypes(module: ModuleType) -> Outcome:
    """HDO takes loaded masters for fp32 parameters too; on `...optimizer.cpu_offloading.hybrid_optimizer`."""
    hdo = attribute(module, "HybridDeviceOptimizer")
    name = "_update_fp32_params_by_new_state"
    original = attribute(hdo, name)
    if original_of(original) is not None:
        return Outcome(State.APPLIED, "by an earlier call")
    if not _key_error(original):
        return Outcome(State.NOT_NEEDED, "it accepts parameters without an fp32 copy")

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
    return Outcome(State.APPLIED)


def _key_error(update: Any) -> bool:
    """Whether the function refuses a parameter that is fp32 itself: run on a stand-in with one such parameter."""

    class StandIn:
        param_update_in_fp32 = True

        def __init__(self) -> None:
            param = torch.zeros(1)
            self.state = {param: {"master_param": torch.ones(1)}}
            self.param_to_fp32_param: dict[Any, Any] = {}
            self.gpu_params_map_cpu_copy: dict[Any, Any] = {}
            self.cpu_copys_map_gpu_param: dict[Any, Any] = {}
            self.param_to_inner_param = {param: param}
            self.inner_param_to_orig_param = {param: param}

    try:
        update(StandIn())
    except KeyError:
        return True
    except Exception as error:
        raise PatchError(f"it no longer works on the attributes it had ({type(error).__name__}: {error})") from error
    return False


def sync_after_load(module: ModuleType) -> Outcome:
    """Loaded masters reach HDO's copies and the weights; on `megatron.core.optimizer.distrib_optimizer`."""
    optimizer = attribute(module, "DistributedOptimizer")
    original = attribute(optimizer, "load_state_dict")
    if original_of(original) is not None:
        return Outcome(State.APPLIED, "by an earlier call")

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
    return Outcome(State.APPLIED)


def keep_step(module: ModuleType) -> Outcome:
    """Adam's step count comes from the parameter groups, as Megatron means it; on `...optimizer.distrib_optimizer`."""
    optimizer = attribute(module, "DistributedOptimizer")
    name = "_set_main_param_and_optimizer_states"
    original = attribute(optimizer, name)
    if original_of(original) is not None:
        return Outcome(State.APPLIED, "by an earlier call")

    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # What is no tensor is skipped there. One format has no step and fails, the other has the one in memory.
        tensors = {**tensors, "step": None}
        if is_offloaded(self.optimizer):
            # Nor has it the master of a main parameter on the GPU, which is its equal.
            tensors.setdefault("master_param", tensors.get("param"))
        original(self, model_param, tensors)

    setattr(optimizer, name, marked(set_states, original))
    return Outcome(State.APPLIED)


def step_every_param(module: ModuleType) -> Outcome:
    """HDO steps fp32 parameters on the GPU too; on `...optimizer.cpu_offloading.hybrid_optimizer`."""
    hdo = attribute(module, "HybridDeviceOptimizer")
    name = "_set_sub_optimizer_grads"
    original = attribute(hdo, name)
    if original_of(original) is not None:
        return Outcome(State.APPLIED, "by an earlier call")

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
    return Outcome(State.APPLIED)
