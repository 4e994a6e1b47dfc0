"""A tiny model under Megatron's real DDP wrapper and real optimizers, and how a trainer uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.mimo import optimizer as mimo_optimizer
from megatron.core.optimizer import (
    OptimizerConfig,
    clip_grads,
    distrib_optimizer,
    get_megatron_optimizer,
    layer_wise_optimizer,
)
from megatron.core.optimizer import optimizer as base_optimizer
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

LR = 1e-3
BASE, TRAINED = 1.0, 5.0


def patched_places() -> list[tuple[Any, str]]:
    """All that the plugin replaces in Megatron."""
    optimizer, hdo = distrib_optimizer.DistributedOptimizer, hybrid_optimizer.HybridDeviceOptimizer
    norm, clip = "get_grad_norm_fp32", "clip_grad_by_total_norm_fp32"
    return [
        (optimizer, "__init__"),
        (optimizer, "_build_model_and_main_param_groups"),
        (optimizer, "load_state_dict"),
        (optimizer, "_set_main_param_and_optimizer_states"),
        (hdo, "_update_fp32_params_by_new_state"),
        (hdo, "_set_sub_optimizer_grads"),
        (clip_grads, norm),
        (clip_grads, clip),
        (base_optimizer, norm),
        (base_optimizer, clip),
        (layer_wise_optimizer, norm),
        (mimo_optimizer, clip),
    ]


class Net(MegatronModule):  # type: ignore[misc]
    """One bf16 weight and one that is fp32 itself, as a router's is; the bf16 one first, as in every real model."""

    def __init__(self, config: TransformerConfig, mixed: bool) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(8, 4, bias=False)
        self.layer.weight.data = self.layer.weight.data.bfloat16()
        self.router = torch.nn.Linear(4, 4, bias=False)
        if not mixed:
            self.router.weight.data = self.router.weight.data.bfloat16()

    def sharded_state_dict(self, prefix: str = "", offsets: Any = (), metadata: Any = None) -> Any:
        return make_sharded_tensors_for_checkpoint(dict(self.named_parameters()), prefix, {}, offsets)


class Trainer:
    """Weights at `BASE`, an optimizer built on them: what a process has before it loads a checkpoint."""

    def __init__(self, *, aware: bool, offload: float | None, mixed: bool = True, lr: float = LR) -> None:
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        self.net = Net(config, mixed)
        self.fill(BASE)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=not aware)
        self.ddp = DistributedDataParallel(config, ddp_config, self.net)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                weight_decay=0.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                clip_grad=1.0,
                optimizer_cpu_offload=offload is not None,
                optimizer_offload_fraction=offload or 0.0,
                overlap_cpu_optimizer_d2h_h2d=False,
                use_precision_aware_optimizer=aware,
                main_grads_dtype=torch.bfloat16 if aware else torch.float32,
            ),
            [self.ddp],
        )
        (self.megatron,) = self.optimizer.chained_optimizers

    def fill(self, value: float) -> None:
        """Writes the weights in place, as a checkpoint load does."""
        with torch.no_grad():
            for param in self.net.parameters():
                param.fill_(value)

    def step(self, gradient: float = 0.5) -> None:
        """One optimizer step on given gradients."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        for param in self.net.parameters():
            param.main_grad.fill_(gradient)
        self.optimizer.step()

    def weights(self) -> dict[str, float]:
        """The first element of each weight (all of a weight's are equal here)."""
        return {name.split(".")[0]: p.detach().reshape(-1)[0].item() for name, p in self.net.named_parameters()}

    def moments(self) -> list[tuple[int, float, float, float]]:
        """Size, Adam step and moments of each state, by size."""
        state = self.megatron.optimizer.state
        return sorted(
            (p.numel(), s["step"].item(), s["exp_avg"][0].item(), s["exp_avg_sq"][0].item()) for p, s in state.items()
        )

    def save(self, path: Path, sharding: str) -> None:
        """Weights and optimizer state through Megatron's own checkpoints, as verl writes them."""
        model = self.net.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(model, metadata=_metadata(sharding))
        path.mkdir()
        dist_checkpointing.save({"model": model, "optimizer": optimizer}, str(path))

    def load(self, path: Path, sharding: str) -> None:
        """The weights, then the optimizer state, in verl's order."""
        loaded = dist_checkpointing.load({"model": self.net.sharded_state_dict()}, str(path))
        self.net.load_state_dict(loaded["model"])
        model = self.net.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=True, metadata=_metadata(sharding))
        self.optimizer.load_state_dict(dist_checkpointing.load({"optimizer": optimizer}, str(path))["optimizer"])


def _metadata(sharding: str) -> dict[str, Any]:
    return {"distrib_optim_sharding_type": sharding, "distrib_optim_fully_reshardable_mem_efficient": False}
