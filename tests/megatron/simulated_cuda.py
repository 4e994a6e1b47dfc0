"""A GPU that is not there: Megatron's real optimizer code on CPU tensors that say they are CUDA tensors.

Megatron asks for the device "cuda", for the name of a tensor's type and for `is_cuda`, and takes streams for granted.
Inside `simulated_cuda()` new tensors for "cuda" are made on the CPU and count as being on the GPU; what `.cpu()`,
`.to("cpu")` and device="cpu" make counts as being in host memory, and so does all that is computed from such tensors
alone. Streams and events do nothing. No arithmetic is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

_FACTORIES = {
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "randint",
    "zeros_like",
    "ones_like",
}
_FACTORIES |= {"empty_like", "rand_like", "randn_like", "full_like", "as_tensor"}
_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


def _is_cpu(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu"


def _is_cuda(device: Any) -> bool:
    # A bare number is a GPU's.
    return isinstance(device, int) or (isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda")


class _Mode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        # By storage, so that views count with their base. A weak reference keeps the address from being used again.
        self._host: dict[int, StorageWeakRef] = {}

    def _mark_host(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._host[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def _on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunction():
            if name == "__get__" and args and isinstance(args[0], torch.Tensor):
                owner = getattr(func, "__self__", None)
                if owner is torch.Tensor.is_cuda:
                    return not self._on_host(args[0])
            if name == "type" and len(args) == 1 and not kwargs:
                tensor = args[0]
                if not self._on_host(tensor) and tensor.dtype in _TYPE_NAMES:
                    return _TYPE_NAMES[tensor.dtype]
            if name == "pin_memory":
                return args[0]
            if name == "cuda":
                return args[0].clone() if self._on_host(args[0]) else args[0]
            to_host = name == "cpu"
            if name == "to":
                wanted = [a for a in [*args[1:], kwargs.get("device")] if isinstance(a, (str, int, torch.device))]
                if any(_is_cuda(a) for a in wanted):
                    args = tuple("cpu" if isinstance(a, (str, int, torch.device)) and _is_cuda(a) else a for a in args)
                    if "device" in kwargs:
                        kwargs["device"] = "cpu"
                    result = func(*args, **kwargs)
                    return result.clone() if self._on_host(result) else result
                to_host = any(_is_cpu(a) for a in wanted)
            if name in _FACTORIES:
                device = kwargs.get("device")
                kwargs.pop("pin_memory", None)
                if _is_cuda(device):
                    kwargs["device"] = "cpu"
                result = func(*args, **kwargs)
                like = name.endswith("_like") and self._on_host(args[0])
                return self._mark_host(result) if (_is_cpu(device) or (device is None and like)) else result
            result = func(*args, **kwargs)
            if to_host and isinstance(result, torch.Tensor):
                # A real copy: on a GPU machine the two would not share memory.
                return self._mark_host(result if self._on_host(args[0]) else result.clone())
            inputs = [a for a in args if isinstance(a, torch.Tensor)]
            if isinstance(result, torch.Tensor) and inputs and all(self._on_host(a) for a in inputs):
                self._mark_host(result)
            return result


class _Stream:
    def wait_stream(self, _other: Any) -> None: ...

    def record_event(self, _event: Any = None) -> _Stream:
        return self

    def wait(self, *_args: Any) -> None: ...

    def wait_event(self, _event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, *_args: Any) -> None: ...


@contextlib.contextmanager
def simulated_cuda() -> Iterator[None]:
    """See the module."""
    stream = _Stream()
    functions = {
        "current_device": lambda: 0,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "Stream": lambda *_args, **_kwargs: stream,
        "Event": lambda *_args, **_kwargs: stream,
        "stream": lambda _stream: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0),
        "get_device_capability": lambda *_: (9, 0),
    }
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(_Mode())
        yield
