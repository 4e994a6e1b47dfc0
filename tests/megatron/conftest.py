"""Fixtures: one process as a whole Megatron world, and a GPU that is simulated."""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def _is_installed(package: str, part: str) -> bool:
    # The part is asked for too: a directory of the package's name (this one) can pass for the package.
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(f"{package}.{part}") is not None


HAVE_MEGATRON = _is_installed("torch", "optim") and _is_installed("megatron", "core")
if not HAVE_MEGATRON:
    # `test_in_runtime` starts the others where they can run.
    collect_ignore = [p.name for p in Path(__file__).parent.glob("test_*.py") if p.name != "test_in_runtime.py"]


def _stand_in_for_triton_kernels() -> None:
    """The one module of megatron-core 0.19.2 that imports triton without asking: two GPU kernels.

    Triton is 190 MB and would only be imported. All other modules see, truthfully, that there is none.
    """
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if importlib.util.find_spec("triton") is None and name not in sys.modules:
        module = types.ModuleType(name)
        module.GLOBAL_BLOCK_SIZE = 1024  # type: ignore[attr-defined]
        module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = None  # type: ignore[attr-defined]
        sys.modules[name] = module


if HAVE_MEGATRON:
    _stand_in_for_triton_kernels()
    warnings.simplefilter("ignore")


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group and Megatron's groups of one rank; only what was made here is taken down."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    made_world = not dist.is_initialized()
    if made_world:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made_groups = not parallel_state.model_parallel_is_initialized()
    if made_groups:
        parallel_state.initialize_model_parallel()
    yield
    if made_groups:
        parallel_state.destroy_model_parallel()
    if made_world:
        dist.destroy_process_group()


@pytest.fixture
def gpu() -> Iterator[None]:
    """See `simulated_cuda`."""
    from simulated_cuda import simulated_cuda

    with simulated_cuda():
        yield


@pytest.fixture(autouse=True)
def upstream() -> Iterator[None]:
    """Every test starts with upstream's code and leaves it so: what patches replace is put back."""
    if not HAVE_MEGATRON:
        yield
        return
    import toy

    saved: list[tuple[Any, str, Any]] = [(owner, name, vars(owner)[name]) for owner, name in toy.patched_places()]
    yield
    for owner, name, value in saved:
        setattr(owner, name, value)
