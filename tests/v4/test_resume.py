"""A run of a tiny true V4 that was interrupted equals one that was not, with the fixes as the plugin decides them.

Megatron's DDP, distributed optimizer, HybridDeviceOptimizer and checkpoints, on CPU tensors in two simulated memories.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simulated_cuda
import tiny
import torch

from dsv4kit.plugin import megatron_optimizer, optimizer_state
from dsv4kit.plugin.fidelity import FidelityError
from dsv4kit.plugin.fidelity_hooks import refuse_unloadable

pytestmark = pytest.mark.usefixtures("one_rank", "local", "cpu", "decided")


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every fix as it decides for this Megatron; what they replace is put back."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer.cpu_offloading import hybrid_optimizer
    from toy import patched_places

    saved = [(owner, name, vars(owner)[name]) for owner, name in patched_places()]
    megatron_optimizer.no_grad_main_params(distrib_optimizer)
    megatron_optimizer.grad_norm_per_dtype(clip_grads)
    megatron_optimizer.clipping_per_dtype(clip_grads)
    for fix in (optimizer_state.order_params, optimizer_state.keep_step, optimizer_state.sync_after_load):
        fix(distrib_optimizer)
    for fix in (optimizer_state.load_mixed_dtypes, optimizer_state.step_every_param):
        fix(hybrid_optimizer)
    yield
    for owner, name, value in saved:
        setattr(owner, name, value)


class Run:
    """A process of training: a model, DDP and the optimizer on top."""

    def __init__(self, aware: bool, offload: float) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        made = tiny.config(dsa_indexer_loss_coeff=0.01, dsa_indexer_use_sparse_loss=True)
        self.model = tiny.model(made)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=not aware)
        self.ddp = DistributedDataParallel(made, ddp_config, self.model)
        with simulated_cuda.simulated_cuda():
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=3e-3,
                    bf16=True,
                    params_dtype=torch.bfloat16,
                    use_distributed_optimizer=True,
                    clip_grad=1.0,
                    optimizer_cpu_offload=True,
                    optimizer_offload_fraction=offload,
                    overlap_cpu_optimizer_d2h_h2d=False,
                    use_precision_aware_optimizer=aware,
                    main_grads_dtype=torch.bfloat16 if aware else torch.float32,
                ),
                [self.ddp],
            )

    def step(self, seed: int) -> float:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = tiny.loss(self.ddp, seed=seed)
        loss.backward()
        with simulated_cuda.simulated_cuda():
            self.optimizer.step()
        return loss.item()

    def states(self, sharding: str, is_loading: bool = False) -> tuple[Any, Any]:
        metadata = {"distrib_optim_sharding_type": sharding, "distrib_optim_fully_reshardable_mem_efficient": False}
        metadata |= {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        model = self.model.sharded_state_dict(metadata=metadata)
        return model, self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)

    def save(self, path: Path, sharding: str) -> None:
        from megatron.core import dist_checkpointing

        path.mkdir()
        with simulated_cuda.simulated_cuda():
            model, optimizer = self.states(sharding)
            dist_checkpointing.save({"model": model, "optimizer": optimizer}, str(path))
        refuse_unloadable(path)

    def load(self, path: Path, sharding: str) -> None:
        """In verl's order: the weights, then the optimizer."""
        from megatron.core import dist_checkpointing

        with simulated_cuda.simulated_cuda():
            weights = dist_checkpointing.load({"model": self.model.sharded_state_dict()}, str(path))
            self.model.load_state_dict(weights["model"], strict=False)
            _, optimizer = self.states(sharding, is_loading=True)
            self.optimizer.load_state_dict(dist_checkpointing.load({"optimizer": optimizer}, str(path))["optimizer"])


@pytest.mark.parametrize("sharding", ["dp_reshardable", "fully_reshardable"])
@pytest.mark.parametrize(("aware", "offload"), [(False, 1.0), (False, 0.5), (True, 1.0)])
def test_resumed_equals_uninterrupted(aware: bool, offload: float, sharding: str, tmp_path: Path) -> None:
    straight = Run(aware, offload)
    losses = [straight.step(1), straight.step(1)]
    assert losses[1] < losses[0]
    try:
        straight.save(tmp_path / "checkpoint", sharding)
    except FidelityError as refused:
        if sharding == "dp_reshardable":
            raise
        pytest.skip(f"refused: {refused}")
    resumed = Run(aware, offload)
    resumed.load(tmp_path / "checkpoint", sharding)
    assert [resumed.step(seed) for seed in (1, 2, 1)] == [straight.step(seed) for seed in (1, 2, 1)]
    for (name, was), now in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(was, now), name
