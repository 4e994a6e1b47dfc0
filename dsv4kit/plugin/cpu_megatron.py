"""DeepSeek-V4 of Megatron-LM's dev branch on a CPU: what its training path wants of a GPU machine, without one.

    VERL_USE_EXTERNAL_MODULES=dsv4kit.plugin.cpu_platform,dsv4kit.plugin.cpu_megatron

with checkouts of Megatron-LM and Megatron-Bridge on the path (docs/v4.md): verl's own Megatron engine then trains on
gloo. No file is edited and no arithmetic is changed. Each function below removes one blocker and says which; tests call
them one by one, `install()` is all of them for a process that lives as long as its trainer.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch.overrides import TorchFunctionMode

_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


def before_import() -> None:
    """Stand-ins for two modules: kernels of Triton, and the Hadamard transform that sparse attention imports."""
    # Compiling would need a C++ compiler, and half a minute.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if importlib.util.find_spec("triton") is None and name not in sys.modules:
        stash: Any = types.ModuleType(name)
        stash.GLOBAL_BLOCK_SIZE = 1024
        stash.paged_stash_copy_kernel = stash.paged_stash_pop_kernel = None
        sys.modules[name] = stash
    if "fast_hadamard_transform" not in sys.modules and importlib.util.find_spec("fast_hadamard_transform") is None:
        module: Any = types.ModuleType("fast_hadamard_transform")
        module.hadamard_transform = hadamard_transform
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The Walsh-Hadamard transform of the last dimension, a power of two, times `scale`."""
    size, half = x.size(-1), 1
    y = x.float()
    while half < size:
        y = y.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        y = torch.stack((y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]), -2).reshape(*x.shape[:-1], size)
        half *= 2
    return (y * scale).to(x.dtype)


def cpu_for_cuda(patch: Any) -> None:
    """`torch.cuda`'s streams, marks and current device, as names that do nothing; `patch` is pytest's monkeypatch."""

    class Stream:
        def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return lambda *_args, **_kwargs: self

    stream = Stream()
    for name, value in {
        "current_device": lambda: torch.device("cpu"),
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *_args: stream,
        "default_stream": lambda *_args: stream,
        "stream": lambda _stream: contextlib.nullcontext(),
        "synchronize": lambda *_args: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        # There is one state of randomness, the CPU's.
        "get_rng_state": lambda *_args: torch.get_rng_state(),
        "set_rng_state": lambda state, *_args: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.cuda.nvtx, "range", lambda *_args, **_kwargs: contextlib.nullcontext())
    # With MTP on a later pipeline stage the ids of the next tokens are sent to "the GPU".
    patch.setattr(torch.Tensor, "cuda", lambda self, *_args, **_kwargs: self)
    from megatron.core.tensor_parallel import random

    patch.setattr(random, "_get_cuda_rng_state", lambda *_args, **_kwargs: torch.get_rng_state())
    patch.setattr(random, "_set_cuda_rng_state", lambda state, *_args, **_kwargs: torch.set_rng_state(state))
    _whole_split_sizes(patch)


def _whole_split_sizes(patch: Any) -> None:
    """Gloo wants numbers where Megatron hands tensors of one number (or an array) as the split of an all-to-all."""
    import torch.distributed as dist

    exchange = dist.all_to_all_single

    def all_to_all_single(*args: Any, **rest: Any) -> Any:
        whole = [*args[:2], *(_whole(sizes) for sizes in args[2:4]), *args[4:]]
        rest |= {name: _whole(rest[name]) for name in ("output_split_sizes", "input_split_sizes") if name in rest}
        return exchange(*whole, **rest)

    patch.setattr(dist, "all_to_all_single", all_to_all_single)


def _whole(sizes: Any) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]


class Linear(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """In place of Transformer Engine's Linear: a weight that every rank has whole, no bias."""

    def __init__(self, size_in: int, size_out: int, *, config: Any, init_method: Any, **_rest: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size_out, size_in, dtype=config.params_dtype))
        init_method(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return functional.linear(x, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)


def local_layers(patch: Any) -> None:
    """Megatron's own layers wherever the specification of V4 asks for Transformer Engine's."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.experimental_attention_variant import deepseek_v4_hybrid_attention

    class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc, unused-ignore]
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if x.dim() <= 3:
                return super().forward(x, *args, **kwargs)
            y, bias = super().forward(x.reshape(x.shape[0], -1, x.shape[-1]), *args, **kwargs)
            return y.reshape(*x.shape[:-1], y.shape[-1]), bias

    class Provider(LocalSpecProvider):  # type: ignore[misc, unused-ignore]
        def linear(self) -> type:
            return Linear

        def column_parallel_linear(self) -> type:
            return ColumnLinear

    patch.setattr(deepseek_v4_hybrid_attention, "TELinear", Linear)
    patch.setattr(specs, "_get_backend_spec_provider", lambda config: Provider())


def fused_checkpoints(patch: Any) -> None:
    """Optimizer checkpoints in the form they have where Transformer Engine's Adam is."""
    from megatron.core.optimizer import distrib_optimizer

    patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)


class FusedAdam(torch.optim.Optimizer):  # type: ignore[misc, unused-ignore]
    """In place of Transformer Engine's: AdamW with one step count per group and none per parameter.

    That is the form Megatron's checkpoints are made for; a fresh optimizer with torch's own AdamW cannot load one.
    """

    def __init__(
        self, params: Any, lr: float, weight_decay: float, betas: tuple[float, float], eps: float, **_rest: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    def step(self, closure: Any = None) -> None:
        """One step of every parameter that has a gradient."""
        with torch.no_grad():
            for group in self.param_groups:
                count = group["step"] = group.get("step", 0) + 1
                (first, second), rate = group["betas"], group["lr"]
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter]
                    if not state:
                        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                    gradient = parameter.grad.to(parameter.dtype)
                    state["exp_avg"].lerp_(gradient, 1 - first)
                    state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                    size = (state["exp_avg_sq"] / (1 - second**count)).sqrt_().add_(group["eps"])
                    parameter.mul_(1 - rate * group["weight_decay"])
                    parameter.addcdiv_(state["exp_avg"], size, value=-rate / (1 - first**count))


def fused_adam(patch: Any) -> None:
    """That Adam where Megatron looks for a fused one."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    fused_checkpoints(patch)
    for module in (optimizer, distrib_optimizer):
        patch.setattr(module, "Adam", FusedAdam)
    patch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    if hasattr(distrib_optimizer, "USING_APEX_OPTIMIZER"):
        patch.setattr(distrib_optimizer, "USING_APEX_OPTIMIZER", True)


class _AnyType(type):
    """The type of every name in a package that is not there: its attributes and subscripts are more of the kind."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _any_class(name)

    def __or__(cls, _other: Any) -> Any:
        return typing.Any

    def __ror__(cls, _other: Any) -> Any:
        return typing.Any

    def __getitem__(cls, _item: Any) -> Any:
        return cls


def _any_class(name: str) -> Any:
    return _AnyType(name, (), {"__init__": lambda self, *_args, **_kwargs: None})


class _AnyModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - the import system's own attribute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_question = name.startswith(("is_", "has_"))
        value = (lambda *_args, **_kwargs: False) if is_question else _any_class(name)
        setattr(self, name, value)
        return value


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for packages that Megatron-Bridge imports and a CPU has no use for; last in line, so a real one wins."""

    names = ("transformer_engine", "modelopt", "megatron.energon")

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if any(name == own or name.startswith(f"{own}.") for own in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _AnyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def bridge_imports() -> None:
    """Lets Megatron-Bridge be imported without Transformer Engine, ModelOpt and Energon, and know the layers here.

    Megatron-Core comes first: each module of it looks for Transformer Engine, and has to find, truthfully, none.
    """
    if not hasattr(typing, "override"):  # Python 3.11; Bridge is written for 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined, unused-ignore]
    import megatron.core

    for found in pkgutil.walk_packages(megatron.core.__path__, "megatron.core."):
        if any(part in found.name for part in (".inference", "nvrx", "resiliency", "mamba")) and (
            "utils" not in found.name
        ):
            continue
        with contextlib.suppress(Exception):  # what needs a GPU's packages is not imported by V4 either
            importlib.import_module(found.name)
    if not any(isinstance(finder, _Absent) for finder in sys.meta_path):
        sys.meta_path.append(_Absent())
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type("Linear", "replicated")
    AutoMapping.register_module_type("ColumnLinear", "column")


class CudaIsCpu(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """New tensors and moves that ask for "cuda" stay on the CPU; types say what Megatron's optimizer looks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "type" and len(args) == 1 and not kwargs and args[0].dtype in _TYPE_NAMES:
            return _TYPE_NAMES[args[0].dtype]
        if name in ("cuda", "pin_memory"):
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if isinstance(kwargs.get("pin_memory"), bool):
            kwargs["pin_memory"] = False
        if name == "to":
            args = tuple(_on_cpu(value) for value in args)
        return func(*args, **kwargs)


def _on_cpu(device: Any) -> Any:
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


class ForGood:
    """In place of pytest's monkeypatch: what is set stays."""

    @staticmethod
    def setattr(owner: Any, name: str, value: Any) -> None:
        """As the built-in one."""
        setattr(owner, name, value)


def install() -> None:
    """All of the above, for the life of this process."""
    before_import()
    bridge_imports()
    cpu_for_cuda(ForGood)
    local_layers(ForGood)
    fused_adam(ForGood)
    CudaIsCpu().__enter__()
