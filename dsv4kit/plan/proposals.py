"""What has to be set to get from one question to another: the settings behind a lever or a searched layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsv4kit.plan.counted.inputs import Question

_PINNED = "env.PYTORCH_CUDA_ALLOC_CONF"


def changes(before: Question, after: Question) -> dict[str, object]:
    """Settings keys and their new values; what neither question asks about stays as it is."""
    return dict(_changes(before, after))


def as_set(changed: Mapping[str, object]) -> str:
    """The changes as SET takes them."""
    return " ".join(f"{key}={_text(value)}" for key, value in changed.items())


def _text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _changes(before: Question, after: Question) -> Iterator[tuple[str, object]]:
    old, new = before.parallel, after.parallel
    if new.nodes != old.nodes:
        yield "schedule.nodes", new.nodes
    for name in ("tensor", "pipeline", "expert", "context"):
        if getattr(new, name) != getattr(old, name):
            yield f"parallel.actor.{name}_parallel_size", getattr(new, name)
    if after.layout != before.layout:
        yield "parallel.actor.layout", after.layout
    tokens = after.work.micro_batch_tokens
    if tokens != before.work.micro_batch_tokens or new.context != old.context:
        # One longest sequence over CP is what no setting at all means.
        yield (
            "parallel.actor.micro_batch_tokens",
            None if tokens == -(-after.work.sequence_tokens // new.context) else tokens,
        )
    if after.training.recompute != before.training.recompute:
        yield "engine.full_recompute", after.training.recompute
    yield from _optimizer(before, after)
    yield from _rollout(before, after)


def _optimizer(before: Question, after: Question) -> Iterator[tuple[str, object]]:
    old, new = before.levers, after.levers
    for name in (
        *("cpu_offload", "offload_fraction", "precision_aware", "bf16_gradients", "gpu_state_bytes"),
        *("param_offload", "optimizer_offload"),
    ):
        if getattr(new, name) != getattr(old, name):
            yield f"optimizer.{name}", getattr(new, name)
    if new.pinned_round_threshold_mb != old.pinned_round_threshold_mb:
        there = dict(before.env).get("PYTORCH_CUDA_ALLOC_CONF")
        wanted = f"pinned_max_round_threshold_mb:{new.pinned_round_threshold_mb}"
        yield _PINNED, f"{there},{wanted}" if there else wanted
    if new.object_store_gib != old.object_store_gib:
        yield "ray.object_store_gib", new.object_store_gib


def _rollout(before: Question, after: Question) -> Iterator[tuple[str, object]]:
    old, new = before.rollout, after.rollout
    if old is None or new is None:
        return
    if new.tensor != old.tensor:
        yield "rollout.tensor_model_parallel_size", new.tensor
    if new.data != old.data:
        yield "parallel.rollout.data_parallel_size", new.data
    if (new.gpus, new.expert) != (old.gpus, old.expert):
        # All of a replica is what no setting at all means.
        yield "parallel.rollout.expert_parallel_size", None if new.expert == new.gpus else new.expert
    if new.utilization != old.utilization:
        yield "parallel.rollout.gpu_memory_utilization", new.utilization
    if new.max_batched_tokens != old.max_batched_tokens:
        yield "parallel.rollout.max_num_batched_tokens", new.max_batched_tokens
