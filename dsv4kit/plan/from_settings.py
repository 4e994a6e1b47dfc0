"""From a resolved profile to a planner's question."""

from __future__ import annotations

import re

from dsv4kit.config import schema, time_limit
from dsv4kit.errors import UserError
from dsv4kit.plan.considered import not_considered
from dsv4kit.plan.counted.geometry import ModelShape
from dsv4kit.plan.counted.inputs import (
    ActorSplit,
    Levers,
    NodeKind,
    Question,
    RecipeKind,
    RolloutSplit,
    RunLength,
    Training,
    Work,
)

_DIST_KEY = "actor_rollout_ref.actor.megatron.use_dist_checkpointing"
_ACTOR = "actor_rollout_ref.actor"
_EPOCHS, _MINI_BATCH = f"{_ACTOR}.ppo_epochs", f"{_ACTOR}.ppo_mini_batch_size"
_DYNAMIC = {"grpo": f"{_ACTOR}.use_dynamic_bsz", "sft": "data.use_dynamic_bsz"}
_MICRO_BATCH = {"grpo": f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "sft": "data.micro_batch_size_per_gpu"}
_BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
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
            micro_batch_tokens=_micro_batch_tokens(settings, recipe, longest),
            mean_response_tokens=_mean(data),
            packed=settings.verl.get(_DYNAMIC[recipe]) is not False,
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
            keep_last=settings.checkpoint.keep_last,
            keep_every=settings.checkpoint.keep_every,
            keep_best=settings.checkpoint.keep_best,
        ),
        env=tuple(settings.env.items()),
        training=_training(settings, recipe),
        not_considered=tuple(not_considered(settings.verl)),
    )


def _mean(data: schema.Data) -> int | None:
    if data.mean_response_length and data.mean_response_length > data.max_response_length:
        raise UserError(
            f"data.mean_response_length={data.mean_response_length}: above data.max_response_length="
            f"{data.max_response_length}"
        )
    return data.mean_response_length


def _micro_batch_tokens(settings: schema.Settings, recipe: RecipeKind, longest: int) -> int:
    """Tokens of a micro-batch on one rank; where verl does not pack by tokens, so many of the longest sequences."""
    actor, verl = settings.parallel.actor, settings.verl
    share = -(-longest // actor.context_parallel_size)
    if verl.get(_DYNAMIC[recipe]) is False:
        size = verl.get(_MICRO_BATCH[recipe])
        return (size if isinstance(size, int) and size > 0 else 1) * share
    return actor.micro_batch_tokens or share


def _training(settings: schema.Settings, recipe: RecipeKind) -> Training:
    """What raw keys of verl's make a step do."""
    verl = settings.verl
    training = Training(recompute=settings.engine.full_recompute)
    if recipe == "sft":
        return training
    epochs, mini, every = (verl.get(key) for key in (_EPOCHS, _MINI_BATCH, "trainer.test_freq"))
    return training._replace(
        epochs=_positive(epochs) or 1,
        updates=max(1, settings.data.train_batch_size // (_positive(mini) or settings.data.train_batch_size)),
        reference=bool(verl.get(f"{_ACTOR}.use_kl_loss") or verl.get("algorithm.use_kl_in_reward")),
        validate_every=_positive(every),
    )


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


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
    given = {
        "tflops": hardware.peak_bf16_tflops,
        "hbm_tb_per_s": hardware.hbm_tb_per_s,
        "nvlink_gb_per_s": hardware.nvlink_gb_per_s,
        "network_gb_per_s": hardware.network_gb_per_s,
        "host_link_gb_per_s": hardware.host_link_gb_per_s,
    }
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
        **{name: value for name, value in given.items() if value is not None},
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
        max_sequences=settings.rollout.max_num_seqs,
        bucket_mb=_positive(settings.verl.get(_BUCKET)) or 512,
    )


def _threshold(env: dict[str, str]) -> int | None:
    """torch's limit for rounding pinned tensors up, where the environment sets one."""
    found = _THRESHOLD.search(env.get("PYTORCH_CUDA_ALLOC_CONF", "") + "," + env.get("PYTORCH_ALLOC_CONF", ""))
    return int(found.group(1)) if found else None
