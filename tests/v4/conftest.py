"""DeepSeek-V4 itself on a CPU, from checkouts of Megatron-LM and Megatron-Bridge that the user names."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "megatron")]
INSIDE = os.environ.get("DSV4KIT_TEST_V4") == "1"
if INSIDE:
    from dsv4kit.plugin import cpu_megatron

    cpu_megatron.before_import()
    warnings.simplefilter("ignore")
    collect_ignore = ["test_with_checkouts.py"]
else:
    # `test_with_checkouts` says how to start the others.
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if path.name != "test_with_checkouts.py"]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one rank, and Megatron's groups."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        tensor_parallel.random.initialize_rng_tracker(force_reset=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own layers in place of Transformer Engine's."""
    cpu_megatron.local_layers(monkeypatch)
    cpu_megatron.fused_checkpoints(monkeypatch)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda` as names that do nothing."""
    cpu_megatron.cpu_for_cuda(monkeypatch)
