"""Keys of verl's Megatron engine and its optimizer; GRPO and SFT have them under different prefixes.

Spelling and effect: verl 0.9.1 `workers/engine/megatron/transformer_impl.py`, `utils/megatron/optimizer.py`,
`trainer/config/{engine,optim}/megatron.yaml`.
"""

from __future__ import annotations

from dsv4kit.config.schema import Settings
from dsv4kit.verl_keys.features import Features
from dsv4kit.verl_keys.pairs import Pair, Pairs, longest_sequence


def engine(settings: Settings, features: Features, prefix: str, layout: str | None) -> Pairs:
    """Parallel split, offloading, checkpoints, and what the model is built with. `prefix` ends without a dot."""
    actor, optimizer, checkpoint = settings.parallel.actor, settings.optimizer, settings.checkpoint
    for name, value, setting in (
        ("tensor_model_parallel_size", actor.tensor_parallel_size, "tensor_parallel_size"),
        ("pipeline_model_parallel_size", actor.pipeline_parallel_size, "pipeline_parallel_size"),
        ("expert_model_parallel_size", actor.expert_parallel_size, "expert_parallel_size"),
        ("context_parallel_size", actor.context_parallel_size, "context_parallel_size"),
        # 1 unless said otherwise, which verl would not do: its own default is the tensor parallel size.
        ("expert_tensor_parallel_size", actor.expert_tensor_parallel_size, "expert_tensor_parallel_size"),
    ):
        yield Pair(f"{prefix}.{name}", value, f"parallel.actor.{setting}")
    yield Pair(f"{prefix}.param_offload", optimizer.param_offload, "optimizer.param_offload")
    yield Pair(f"{prefix}.optimizer_offload", optimizer.optimizer_offload, "optimizer.optimizer_offload")
    if features.grad_offload:
        # verl main of August 2026: gradients have a switch of their own; elsewhere param_offload releases them.
        yield Pair(f"{prefix}.grad_offload", optimizer.param_offload, "optimizer.param_offload")
    # The one bridge verl's engine accepts, and the one that knows DeepSeek-V4 (transformer_impl.py:191).
    yield Pair(f"{prefix}.use_mbridge", True, "engine.backend")
    yield Pair(f"{prefix}.vanilla_mbridge", False, "engine.backend")
    sharded = checkpoint.dist_checkpoint_path is not None
    yield Pair(f"{prefix}.use_dist_checkpointing", sharded, "checkpoint.dist_checkpoint_path")
    if sharded:
        yield Pair(
            f"{prefix}.dist_checkpointing_path", checkpoint.dist_checkpoint_path, "checkpoint.dist_checkpoint_path"
        )
    if optimizer.bf16_gradients and not optimizer.precision_aware:
        # With the precision-aware optimizer the buffers follow its main_grads_dtype.
        yield Pair(f"{prefix}.override_ddp_config.grad_reduce_in_fp32", False, "optimizer.bf16_gradients")
    yield from _transformer(settings, f"{prefix}.override_transformer_config", layout)


def _transformer(settings: Settings, prefix: str, layout: str | None) -> Pairs:
    """Fields of Megatron's own configuration of the model."""
    actor, kernels = settings.parallel.actor, settings.kernels
    if settings.engine.full_recompute:
        for name, value in (("granularity", "full"), ("method", "uniform")):
            yield Pair(f"{prefix}.recompute_{name}", value, "engine.full_recompute")
        yield Pair(
            f"{prefix}.recompute_num_layers", settings.engine.recompute_num_layers, "engine.recompute_num_layers"
        )
    if actor.pipeline_parallel_size > 1:
        # Always said: the bridge's own layout breaks the rule on hash layers at PP32, and weighs no embedding or head.
        yield Pair(f"{prefix}.pipeline_model_parallel_layout", actor.layout or layout, "parallel.actor.layout")
    for name, kernel in (
        ("apply_dsa_kernel_fusion", "dsa_fusion"),
        ("apply_rope_fusion", "rope_fusion"),
        ("use_fused_mhc", "fused_mhc"),
    ):
        if (wanted := getattr(kernels, kernel)) is not None:
            yield Pair(f"{prefix}.{name}", wanted, f"kernels.{kernel}")
    if actor.context_parallel_size > 1:
        setting = "parallel.actor.context_parallel_size"
        # Megatron refuses anything else for this attention: each rank owns one stretch of the packed samples.
        yield Pair(f"{prefix}.cp_partition_mode", "contiguous", setting)
        # verl writes this value over any other (transformer_impl.py:316-324).
        yield Pair(f"{prefix}.sequence_packing_scheduler", "default_dynamic_cp", setting)
        share = -(-longest_sequence(settings) // actor.context_parallel_size)
        yield Pair(f"{prefix}.max_seqlen_per_dp_cp_rank", share, setting)


def optimizer(settings: Settings, prefix: str) -> Pairs:
    """Where Adam runs and in what precision; dtypes under verl's own keys, which alone turn their names into types."""
    levers = settings.optimizer
    if levers.cpu_offload:
        own = f"{prefix}.override_optimizer_config"
        yield Pair(f"{own}.optimizer_cpu_offload", True, "optimizer.cpu_offload")
        # Megatron's default fraction is 0: cpu_offload alone offloads nothing.
        yield Pair(f"{own}.optimizer_offload_fraction", levers.offload_fraction, "optimizer.offload_fraction")
        yield Pair(f"{own}.overlap_cpu_optimizer_d2h_h2d", True, "optimizer.cpu_offload")
    if levers.precision_aware:
        gradients = "bf16" if levers.bf16_gradients else "fp32"
        yield Pair(f"{prefix}.use_precision_aware_optimizer", True, "optimizer.precision_aware")
        yield Pair(f"{prefix}.main_grads_dtype", gradients, "optimizer.bf16_gradients")
        if levers.gpu_state_bytes == 4:
            # No effect on what runs on the CPU: Megatron's hybrid optimizer keeps fp32 there.
            yield Pair(f"{prefix}.exp_avg_dtype", "bf16", "optimizer.gpu_state_bytes")
            yield Pair(f"{prefix}.exp_avg_sq_dtype", "bf16", "optimizer.gpu_state_bytes")
