"""What DeepSeek-V4's training path wants of a GPU machine, made for a CPU; no arithmetic is changed.

`before_import()` comes before anything imports megatron.core; `local_layers()` after. Neither edits a file.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

import torch
import torch.nn.functional as functional


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
    if importlib.util.find_spec("fast_hadamard_transform") is None:
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
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.cuda.nvtx, "range", lambda *_args, **_kwargs: contextlib.nullcontext())
    from megatron.core.tensor_parallel import random

    # Recomputation keeps the GPU's state of randomness; here there is one state, the CPU's, which it keeps too.
    patch.setattr(random, "_get_cuda_rng_state", lambda *_args, **_kwargs: torch.get_rng_state())
    patch.setattr(random, "_set_cuda_rng_state", lambda *_args, **_kwargs: None)


class Linear(torch.nn.Module):
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
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.experimental_attention_variant import deepseek_v4_hybrid_attention

    class Column(ColumnParallelLinear):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if x.dim() <= 3:
                return super().forward(x, *args, **kwargs)
            y, bias = super().forward(x.reshape(x.shape[0], -1, x.shape[-1]), *args, **kwargs)
            return y.reshape(*x.shape[:-1], y.shape[-1]), bias

    class Provider(LocalSpecProvider):
        def linear(self) -> type:
            return Linear

        def column_parallel_linear(self) -> type:
            return Column

    patch.setattr(deepseek_v4_hybrid_attention, "TELinear", Linear)
    patch.setattr(specs, "_get_backend_spec_provider", lambda config: Provider())
    patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
