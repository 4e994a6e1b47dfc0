"""Two defects of Megatron-Core's optimizer, mended at run time. Sources: Megatron-LM #8245 (A) and #7279, #7338 (B).

A. `DistributedOptimizer._build_model_and_main_param_groups` cuts the fp32 main-parameter shards out of the parameters
   with autograd on, for fp32 and for quantised ones. The shards are then no leaves and the inner optimizer refuses
   them: "can't optimize a non-leaf Tensor".

B. `get_grad_norm_fp32` and `clip_grad_by_total_norm_fp32` hand all gradients to one fused kernel, which takes the type
   of the whole list from its first tensor. A list of bf16 and fp32 gradients (precision-aware optimizer, bf16 main
   gradients, fp32-native parameters) gives a wrong norm or an illegal memory access.

Whether an installed Megatron has a defect is found out by running the function in question on two tiny tensors, not by
its version. docs/fixes/ has the evidence.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from dsv4kit.plugin.optimizer_probes import CudaTyped
from dsv4kit.plugin.patching import PatchError, PatchResult, State, attribute, marked, modules_under, original_of

_BUILD = "_build_model_and_main_param_groups"
_FP32_SHARDS = 3
"""The place of `shard_fp32_groups` in what that function returns."""
_NORM = "get_grad_norm_fp32"
_CLIP = "clip_grad_by_total_norm_fp32"


def no_grad_main_params(module: ModuleType) -> PatchResult:
    """Fix A on `megatron.core.optimizer.distrib_optimizer`."""
    optimizer = attribute(module, "DistributedOptimizer")
    build = attribute(optimizer, _BUILD)
    if not isinstance(build, classmethod):
        raise PatchError(f"{_BUILD} is a {type(build).__name__}, no classmethod")
    if original_of(build) is not None:
        return PatchResult(State.APPLIED, "by an earlier call")
    evidence = ""
    try:
        if all(_shard_is_leaf(optimizer, build.__func__, dtype) for dtype in (torch.float32, torch.bfloat16)):
            return PatchResult(State.NOT_NEEDED, "the shards it builds are leaves")
    except Exception as error:
        # Applied all the same: without autograd this function does the same in every version.
        evidence = f"the probe could not tell whether it is needed ({type(error).__name__}: {error})"
    original = build.__func__

    @functools.wraps(original)
    def build_leaves(
        cls: Any, gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with torch.no_grad():
            groups = original(cls, gbuf_ranges, param_gbuf_map, opt_group_ranges, *args, **kwargs)
        for shards, group in zip(groups[_FP32_SHARDS], opt_group_ranges, strict=True):
            detached = {id(shard): _detached(shard) for shard in shards}
            shards[:] = [detached[id(shard)] for shard in shards]
            listed = group["orig_group"]["params"]
            group["orig_group"]["params"] = [detached.get(id(param), param) for param in listed]
        return groups

    setattr(optimizer, _BUILD, classmethod(marked(build_leaves, original)))
    return PatchResult(State.APPLIED, evidence)


def _detached(shard: torch.Tensor) -> torch.Tensor:
    """The same memory without any tie to the parameter.

    no_grad alone is not enough: autograd remembers that the shard is a view of a parameter, and refuses to look at it
    (`is_leaf`, `grad`) as soon as the parameter is written in place, which every checkpoint load does.
    """
    free = shard.detach()
    # What Megatron notes on a shard: tensor parallelism, whether it is shared, gradient-norm group.
    vars(free).update(vars(shard))
    return free


def _shard_is_leaf(optimizer: type, build: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Builds the main shard of one parameter: an fp32 one, or a bf16 one that passes for quantised."""
    param = CudaTyped(torch.zeros(4, dtype=dtype))
    probe = type("Probe", (optimizer,), {"_is_distopt_quantized_param": classmethod(lambda _cls, _param: True)})
    ranges: list[Any] = [{dtype: [{"param_map": {param: {"param": SimpleNamespace(start=0, end=4, size=4)}}}]}]
    group: dict[str, Any] = {"params": [param], "orig_group": {"params": [param]}}
    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False, fp8_recipe="blockwise")
    build(probe, ranges, {param: (0, dtype, 0)}, [group], config)
    (shard,) = group["orig_group"]["params"]
    return bool(shard.is_leaf)


def grad_norm_per_dtype(module: ModuleType) -> PatchResult:
    """The half of fix B that computes the norm, on `megatron.core.optimizer.clip_grads`."""
    original = attribute(module, _NORM)
    if original_of(original) is not None:
        return PatchResult(State.APPLIED, "by an earlier call")
    expect_arguments(original, ["grads_for_norm", "norm_type"])

    def probe(gradients: list[torch.Tensor]) -> None:
        original(gradients, 2.0)

    needed, evidence = _hands_mixed_lists_over(module, probe)
    if not needed:
        return PatchResult(State.NOT_NEEDED, evidence)

    def get_grad_norm_fp32(grads_for_norm: Any, norm_type: float = 2, *args: Any, **kwargs: Any) -> Any:
        # Other norms do not use the fused kernel.
        if isinstance(grads_for_norm, torch.Tensor) or float(norm_type) != 2.0 or not _is_mixed(grads_for_norm):
            return original(grads_for_norm, norm_type, *args, **kwargs)
        # The norm of the partial norms is the norm of the whole, so one original call does the one reduction that every
        # rank takes part in, also a rank whose own list has a single dtype.
        return original([_partial_norms(grads_for_norm)], norm_type, *args, **kwargs)

    return _rebind(module, _NORM, original, get_grad_norm_fp32, evidence)


def clipping_per_dtype(module: ModuleType) -> PatchResult:
    """The half of fix B that scales the gradients, on `megatron.core.optimizer.clip_grads`."""
    original = attribute(module, _CLIP)
    if original_of(original) is not None:
        return PatchResult(State.APPLIED, "by an earlier call")
    expect_arguments(original, ["parameters", "max_norm", "total_norm", "use_decoupled_grad"])

    def probe(gradients: list[torch.Tensor]) -> None:
        original([SimpleNamespace(decoupled_grad=g) for g in gradients], 1.0, 2.0, use_decoupled_grad=True)

    needed, evidence = _hands_mixed_lists_over(module, probe)
    if not needed:
        return PatchResult(State.NOT_NEEDED, evidence)

    def clip_grad_by_total_norm_fp32(
        parameters: Any, max_norm: float, total_norm: Any, use_decoupled_grad: bool = False, **kwargs: Any
    ) -> None:
        if isinstance(parameters, torch.Tensor):
            original(parameters, max_norm, total_norm, use_decoupled_grad, **kwargs)
            return
        if not isinstance(parameters, Sequence):
            parameters = list(parameters)
        name = "decoupled_grad" if use_decoupled_grad else "grad"
        dtypes = {g.dtype for p in parameters if (g := getattr(p, name, None)) is not None}
        if len(dtypes) < 2:
            original(parameters, max_norm, total_norm, use_decoupled_grad, **kwargs)
            return
        # No rank talks to another here, so more than one call is safe.
        for dtype in sorted(dtypes, key=str):
            same = [p for p in parameters if getattr(getattr(p, name, None), "dtype", None) is dtype]
            original(same, max_norm, total_norm, use_decoupled_grad, **kwargs)

    return _rebind(module, _CLIP, original, clip_grad_by_total_norm_fp32, evidence)


def expect_arguments(function: Callable[..., Any], names: list[str]) -> None:
    """Refuses a function whose leading arguments are not these: a replacement would pass them on wrongly."""
    found = list(inspect.signature(function).parameters)[: len(names)]
    if found != names:
        raise PatchError(f"{function.__name__} takes {found}, expected {names}")


def _is_mixed(gradients: Any) -> bool:
    return isinstance(gradients, Sequence) and len({g.dtype for g in gradients}) > 1


def _partial_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """One fp32 l2 norm per dtype, in a vector on the gradients' device."""
    if any(hasattr(g, "to_local") for g in gradients):
        raise RuntimeError(
            "dsv4kit: gradients of several dtypes that are DTensors (Megatron-FSDP) are not supported: "
            "the norm over them would need one more reduction than the other ranks make"
        )
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient.detach())
    # Accumulated in fp32 whatever the dtype: a bf16 result would be off by up to 0.4 %.
    return torch.stack(
        [
            torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in same]))
            for same in by_dtype.values()
        ]
    )


def _rebind(
    module: ModuleType, name: str, original: Callable[..., Any], replacement: Callable[..., Any], evidence: str
) -> PatchResult:
    """Puts the replacement wherever the original's name is bound, in modules imported later through `module` itself."""
    replacement.__doc__ = original.__doc__
    marked(replacement, original)
    rebound = []
    for place in [module, *modules_under("megatron"), *modules_under("verl")]:
        if vars(place).get(name) is original:
            setattr(place, name, replacement)
            rebound.append(place.__name__)
    return PatchResult(State.APPLIED, "; ".join(filter(None, [evidence, "bound in " + ", ".join(rebound)])))


def _hands_mixed_lists_over(module: ModuleType, call: Callable[[list[torch.Tensor]], None]) -> tuple[bool, str]:
    """Whether the fused kernel would be given a list of two dtypes; and why, where that could not be seen.

    The kernel's launcher is replaced by one that only notes what it is given, for the time of one call on CPU tensors.
    """
    launches: list[set[torch.dtype]] = []

    def note(_kernel: Any, _overflow: Any, lists: list[list[torch.Tensor]], *_rest: Any) -> Any:
        launches.extend({t.dtype for t in tensors} for tensors in lists)
        return torch.ones(1), None

    try:
        with _without_device(module, note):
            call([torch.ones(2, dtype=torch.bfloat16), torch.ones(2)])
    except Exception as error:
        return True, f"the probe could not tell whether it is needed ({type(error).__name__}: {error})"
    if not launches:
        return True, "the probe saw no kernel launch"
    if any(len(dtypes) > 1 for dtypes in launches):
        return True, ""
    return False, "each kernel launch gets one dtype"


@contextlib.contextmanager
def _without_device(module: ModuleType, launcher: Callable[..., Any]) -> Iterator[None]:
    """Runs `module` without a GPU, without other ranks, and with this kernel launcher."""

    class Torch:
        """`torch` for this module: new tensors go to the CPU, and reductions do nothing."""

        distributed = SimpleNamespace(all_reduce=lambda *_args, **_kwargs: None, ReduceOp=torch.distributed.ReduceOp)

        def __getattr__(self, name: str) -> Any:
            found = getattr(torch, name)
            if name in ("zeros", "tensor"):
                return lambda *args, **kwargs: found(*args, **{**kwargs, "device": "cpu"})
            return found

    changed = {"torch": Torch(), "multi_tensor_applier": launcher}
    saved = {name: vars(module)[name] for name in changed}
    try:
        vars(module).update(changed)
        yield
    finally:
        vars(module).update(saved)
