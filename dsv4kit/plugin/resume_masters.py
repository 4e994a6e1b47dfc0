"""A resume without optimizer state continues from the weights it has loaded (fix C).

Megatron trains fp32 masters: shards on the GPU, or copies in host memory under `HybridDeviceOptimizer` (HDO). They are
made when the optimizer is built, which is before verl loads a checkpoint. A load without optimizer state, which is
what `[model,extra]` means, leaves them as they were: the base model's. The first optimizer step writes them, plus one
update, over the loaded weights, and no metric shows it (megatron-core 0.19.2, verl 0.9.1; docs/fixes/stale-masters.md).
Megatron's own `reload_model_params` refreshes only some of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from dsv4kit.plugin.patching import PatchError, PatchResult, State, attribute, marked, original_of

_log = logging.getLogger(__name__)

_SAMPLED = 1024
"""Values of each master that the quick look takes."""


@dataclass
class Refreshed:
    """How many masters of each kind a refresh found, and how many of them held other weights."""

    found: dict[str, int] = field(default_factory=dict)
    stale: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, stale: bool) -> None:
        """Adds one master."""
        self.found[kind] = self.found.get(kind, 0) + 1
        self.stale[kind] = self.stale.get(kind, 0) + stale

    def __str__(self) -> str:
        parts = [f"{self.stale[kind]} of {number} {kind}" for kind, number in self.found.items()]
        return ", ".join(parts) or "no masters"


def refresh_after_load(module: ModuleType) -> PatchResult:
    """Masters follow a load without optimizer state; on `verl.utils.checkpoint.megatron_checkpoint_manager`."""
    manager = attribute(module, "MegatronCheckpointManager")
    original = attribute(manager, "load_checkpoint")
    if original_of(original) is not None:
        return PatchResult(State.APPLIED, "by an earlier call")
    if not hasattr(manager, "should_load_optimizer"):
        raise PatchError("MegatronCheckpointManager has no 'should_load_optimizer' (upstream renamed or removed it)")

    @functools.wraps(original)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # Here and not in the engine: the engine moves the weights off the GPU before it returns.
        if not self.should_load_optimizer and self.optimizer is not None:
            _log.warning(
                "dsv4kit: masters refreshed from the loaded weights, stale: %s", refresh_masters(self.optimizer)
            )
        return result

    manager.load_checkpoint = marked(load_checkpoint, original)
    return PatchResult(State.APPLIED)


def refresh_masters(optimizer: Any) -> Refreshed:
    """Gives every fp32 master of a Megatron optimizer the value of the weight it belongs to.

    A master that rounds to its weight is left alone: it holds the same weight, more precisely.
    """
    refreshed = Refreshed()
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(one, "is_stub_optimizer", False) or getattr(one, "optimizer", None) is None:
            continue
        if getattr(getattr(one, "ddp_config", None), "use_megatron_fsdp", False):
            raise RuntimeError(
                "dsv4kit: a resume without optimizer state is not possible with Megatron-FSDP: its masters cannot be "
                "refreshed and would overwrite the loaded weights. Save and load 'optimizer' too."
            )
        with torch.no_grad():
            # In this order: without the precision-aware optimizer, HDO copies the shards.
            for weight, master in _gpu_shards(one):
                _follow(refreshed, "GPU shards", weight, master)
            if is_offloaded(one.optimizer):
                for param, master in _hdo_copies(one.optimizer):
                    _follow(refreshed, "offloaded copies", param, master)
            _refresh_fused_masters(refreshed, one.optimizer)
    return refreshed


def sampled_stale_masters(optimizer: Any) -> str:
    """Which masters round to other weights than theirs, by a look at some values of each; empty when none does."""
    stale: dict[str, int] = {}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", None)
        if inner is None or getattr(one, "is_stub_optimizer", False):
            continue
        with torch.no_grad():
            pairs = [("GPU shards", pair) for pair in _gpu_shards(one, quantised=False)]
            pairs += [("offloaded copies", pair) for pair in (_hdo_copies(inner) if is_offloaded(inner) else ())]
            for kind, (weight, master) in pairs:
                every = max(1, weight.numel() // _SAMPLED)
                weight, master = weight.reshape(-1)[::every], master.reshape(-1)[::every]
                if not torch.equal(master.data.to(device=weight.device).to(weight.dtype), weight.data):
                    stale[kind] = stale.get(kind, 0) + 1
    return ", ".join(f"{number} {kind}" for kind, number in stale.items())


def is_offloaded(inner: Any) -> bool:
    """Whether this is a `HybridDeviceOptimizer`, told by what the fixes use of it."""
    return all(hasattr(inner, name) for name in ("param_to_inner_param", "gpu_params_map_cpu_copy", "sub_optimizers"))


def _gpu_shards(one: Any, quantised: bool = True) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each fp32 main parameter on the GPU with the (dequantised) weights it stands for."""
    if hasattr(one, "shard_fp32_from_float16_groups"):
        for models, mains in zip(one.model_float16_groups, one.shard_fp32_from_float16_groups, strict=True):
            for model, main in zip(models, mains, strict=True):
                # None under the precision-aware optimizer, which keeps the master elsewhere.
                if main is not None and (quantised or _is_plain(model)):
                    owned = one._get_model_param_range_map(model)["param"]
                    yield _dequantised(model).reshape(-1)[owned.start : owned.end], main
    elif hasattr(one, "fp32_from_float16_groups"):
        for models, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
            yield from zip(models, mains, strict=True)


def _is_plain(param: torch.Tensor) -> bool:
    return type(param) in (torch.Tensor, torch.nn.Parameter)


def _dequantised(param: torch.Tensor) -> torch.Tensor:
    # Transformer Engine's quantised tensors do not support view().
    return param.detach() if _is_plain(param) else param.dequantize()


def _hdo_copies(inner: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter of an HDO with what is stepped in its place, and with the saved name of that, where it differs."""
    for param, master in inner.param_to_inner_param.items():
        if master is not param:
            yield param, master
        state = inner.state.get(param, {}).get("master_param")
        if state is not None and state is not master and state is not param:
            yield param, state


def _refresh_fused_masters(refreshed: Refreshed, inner: Any) -> None:
    """Masters inside Transformer Engine's FusedAdam (precision-aware, on the GPU).

    It makes them at its first step, so after a plain start there are none; there are after an earlier load.
    """
    if is_offloaded(inner):
        return
    for param, state in inner.state.items():
        master = state.get("master_param")
        if master is None:
            continue
        if master.dtype is torch.int16:
            # The low half of the master; the weight is its high half.
            refreshed.count("FusedAdam masters", bool(master.any()))
            master.zero_()
        elif hasattr(inner, "set_scaled_state"):
            refreshed.count("FusedAdam masters", True)
            inner.set_scaled_state(param, "master_param", param.detach().float())
        else:
            _follow(refreshed, "FusedAdam masters", param, master)


def _follow(refreshed: Refreshed, kind: str, weight: torch.Tensor, master: torch.Tensor) -> None:
    # Compared where the weight is: a step of the host copies is slow, the link to them is not.
    rounded = master.data.to(device=weight.device).to(weight.dtype)
    stale = not torch.equal(rounded, weight.data.view_as(rounded))
    refreshed.count(kind, stale)
    if stale:
        master.data.copy_(weight.data.view_as(master))
