"""From a resolved profile to a planner's question."""

from __future__ import annotations

import re

from dsv4kit.config import schema, time_limit
from dsv4kit.errors import UserError
from dsv4kit.plan.counted.geometry import ModelShape
from dsv4kit.plan.counted.inputs import (
    ActorSplit,
    Levers,
    NodeKind,
    Question,
    RecipeKind,
    RolloutSplit,
    RunLength,
    Work,
)

_DIST_KEY = "actor_rollout_ref.actor.megatron.use_dist_checkpointing"
_THRESHOLD = re.compile(r"pinned_max_round_threshold_mb:(\d+)")


def question(settings: schema.Settings) -> Question | None:
    """The profile as a question; None where its model has no geometry or its hardware no GPUs to plan for."""
    if settings.model.geometry is None or settings.hardware.device == "cpu":
        return None
    actor, optimizer, data = settings.parallel.actor, settings.optimizer, settings.data
    recipe: RecipeKind = "sft" if "sft" in settings.recipe.module else "grpo"
    samples = settings.rollout.n if recipe == "grpo" else 1
    longest = data.max_prompt_length + data.max_response_length
    return Question(
        model=settings.model.name,
        geometry=ModelShape(
            **{**settings.model.geometry.model_dump(), "compress_ratios": _ratios(settings.model.geometry)}
        ),
        hardware=_hardware(settings.hardware),
        recipe=recipe,
        parallel=ActorSplit(
            nodes=settings.schedule.nodes,
            gpus_per_node=settings.hardware.gpus_per_node,
            tensor=actor.tensor_parallel_size,
            pipeline=actor.pipeline_parallel_size,
            expert=actor.expert_parallel_size,
            context=actor.context_parallel_size,
        ),
        work=Work(
            sequences=data.train_batch_size * samples,
            prompt_tokens=data.max_prompt_length,
            response_tokens=data.max_response_length,
            micro_batch_tokens=actor.micro_batch_tokens or -(-longest // actor.context_parallel_size),
        ),
        layout=actor.layout,
        mtp=actor.mtp,
        rollout=_rollout(settings) if recipe == "grpo" else None,
        levers=Levers(
            cpu_offload=optimizer.cpu_offload,
            offload_fraction=optimizer.offload_fraction,
            precision_aware=optimizer.precision_aware,
            bf16_gradients=optimizer.bf16_gradients,
            gpu_state_bytes=optimizer.gpu_state_bytes,
            param_offload=optimizer.param_offload,
            optimizer_offload=optimizer.optimizer_offload,
            pinned_round_threshold_mb=_threshold(settings.env),
            object_store_gib=settings.ray.object_store_gib,
        ),
        contents=tuple(settings.checkpoint.contents),
        dist_checkpoint=bool(settings.checkpoint.dist_checkpoint_path or settings.verl.get(_DIST_KEY)),
        fully_reshardable=any("fully_reshardable" in key and bool(value) for key, value in settings.verl.items()),
        schedule=RunLength(
            steps=settings.schedule.steps,
            segment_steps=settings.schedule.segment_steps,
            save_freq=settings.schedule.save_freq,
            time_limit_s=time_limit.seconds(settings.schedule.time),
        ),
        env=tuple(settings.env.items()),
    )


def _ratios(geometry: schema.Geometry) -> tuple[int, ...]:
    return tuple(geometry.compress_ratios)


def _hardware(hardware: schema.Hardware) -> NodeKind:
    hbm_gib, numa_gb, architecture = (
        hardware.hbm_usable_gib,
        hardware.memory_per_numa_node_gb,
        hardware.cpu_architecture,
    )
    if hbm_gib is None or numa_gb is None or architecture is None:
        raise UserError(
            f"hardware {hardware.name}: the planner needs hbm_usable_gib, memory_per_numa_node_gb and cpu_architecture"
        )
    return NodeKind(
        name=hardware.name,
        gpus_per_node=hardware.gpus_per_node,
        hbm_gib=hbm_gib,
        host_gb=numa_gb * len(hardware.cpu_numa_nodes),
        cpu_architecture=architecture,
        nvlink_domain_gpus=hardware.nvlink_domain_gpus or hardware.gpus_per_node,
        sm_architecture=hardware.sm_architecture or 0,
        cpu_numa_nodes=tuple(hardware.cpu_numa_nodes),
        pinned_counts_as_used=hardware.pinned_counts_as_used,
    )


def _rollout(settings: schema.Settings) -> RolloutSplit:
    rollout, tensor = settings.parallel.rollout, settings.rollout.tensor_model_parallel_size
    longest = settings.data.max_prompt_length + settings.data.max_response_length
    return RolloutSplit(
        tensor=tensor,
        data=rollout.data_parallel_size,
        expert=rollout.expert_parallel_size or tensor * rollout.data_parallel_size,
        utilization=rollout.gpu_memory_utilization,
        max_batched_tokens=rollout.max_num_batched_tokens or longest,
        # verl puts vLLM to sleep with its weights kept on the host when MTP drafts tokens (vllm_async_server.py).
        sleep_level=1 if settings.parallel.actor.mtp else 2,
    )


def _threshold(env: dict[str, str]) -> int | None:
    """torch's limit for rounding pinned tensors up, where the environment sets one."""
    found = _THRESHOLD.search(env.get("PYTORCH_CUDA_ALLOC_CONF", "") + "," + env.get("PYTORCH_ALLOC_CONF", ""))
    return int(found.group(1)) if found else None
