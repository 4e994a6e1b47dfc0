"""What all builders of verl keys share: the pair itself, and the sizes several keys are made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dsv4kit.config.schema import Settings


class Pair(NamedTuple):
    """One verl key, its value, and the settings key that decides it."""

    key: str
    value: Any
    setting: str


Pairs = Iterator[Pair]

SFT_CONFIG = "sft_trainer_engine"


def is_sft(settings: Settings) -> bool:
    """Whether verl's SFT trainer runs, which has a configuration tree of its own and no rollout."""
    return settings.recipe.config_name == SFT_CONFIG


def longest_sequence(settings: Settings) -> int:
    """Tokens of the longest prompt with the longest response."""
    return settings.data.max_prompt_length + settings.data.max_response_length


def batched_tokens(settings: Settings) -> int:
    """Tokens vLLM works on in one step of a replica's rank: those of one longest sequence unless said otherwise."""
    return settings.parallel.rollout.max_num_batched_tokens or longest_sequence(settings)


def micro_batch_tokens(settings: Settings) -> int:
    """Tokens of one packed micro-batch on one rank; verl multiplies by CP."""
    actor = settings.parallel.actor
    return actor.micro_batch_tokens or -(-longest_sequence(settings) // actor.context_parallel_size)


def world(settings: Settings) -> int:
    """All GPUs."""
    return settings.schedule.nodes * settings.hardware.gpus_per_node


def data_parallel(settings: Settings) -> int:
    """Actor ranks that see different samples."""
    actor = settings.parallel.actor
    model = actor.tensor_parallel_size * actor.pipeline_parallel_size * actor.context_parallel_size
    return max(1, world(settings) // model)


def replica_gpus(settings: Settings) -> int:
    """GPUs of one rollout replica."""
    return settings.rollout.tensor_model_parallel_size * settings.parallel.rollout.data_parallel_size


def data_files(given: list[str] | None, data_dir: str, name: str) -> list[str]:
    """The user's files, or the one the kit makes."""
    return list(given) if given else [f"{data_dir}/{name}"]
