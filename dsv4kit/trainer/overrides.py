"""From settings to verl's configuration keys: which key carries which value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsv4kit.config.schema import Settings
from dsv4kit.errors import UserError

# What makes a run a chain of resumable segments; the value is the setting or variable that decides it.
OWNED = {
    "trainer.total_training_steps": "STEPS and SEGMENT_STEPS",
    "trainer.total_epochs": "STEPS",
    "trainer.save_freq": "SAVE_FREQ",
    "trainer.nnodes": "NODES",
    "trainer.n_gpus_per_node": "the hardware",
    "trainer.device": "the hardware",
    "trainer.resume_mode": "the checkpoints of the run",
    "trainer.resume_from_path": "the checkpoints of the run",
    "trainer.default_local_dir": "SET=checkpoint.directory=...",
    "ray_kwargs.ray_init.num_cpus": "the hardware",
}


def build(
    settings: Settings, *, run_name: str, model_path: str, data_dir: str, run_dir: str, kit_dir: str
) -> dict[str, Any]:
    """All verl keys of a run, dotted, except the last step of a segment, which is known only when the segment starts.

    `model_path` and `data_dir` (holding train.parquet and test.parquet) stand in where the profile leaves them to the
    kit; `kit_dir` is the run's frozen copy of the kit.
    """
    clash = next((key for key in settings.verl if key in OWNED), None)
    if clash:
        raise UserError(f"verl.{clash}: the kit sets this key itself, from {OWNED[clash]}")
    pairs = dict(_typed(settings, run_name, model_path, data_dir, run_dir))
    if settings.deterministic:
        pairs |= deterministic(kit_dir)
    return pairs | settings.verl


def _typed(
    settings: Settings, run_name: str, model_path: str, data_dir: str, run_dir: str
) -> Iterator[tuple[str, Any]]:
    data, rollout, schedule = settings.data, settings.rollout, settings.schedule
    yield "data.train_files", data.train_files or [f"{data_dir}/train.parquet"]
    yield "data.val_files", data.val_files or [f"{data_dir}/test.parquet"]
    yield "data.train_batch_size", data.train_batch_size
    yield "data.max_prompt_length", data.max_prompt_length
    yield "data.max_response_length", data.max_response_length
    yield "data.seed", data.seed
    yield "actor_rollout_ref.model.path", settings.model.path or model_path
    yield "actor_rollout_ref.rollout.n", rollout.n
    yield "actor_rollout_ref.rollout.tensor_model_parallel_size", rollout.tensor_model_parallel_size
    yield "actor_rollout_ref.actor.checkpoint.save_contents", list(settings.checkpoint.contents)
    if settings.reward.function_path:
        yield "reward.custom_reward_function.path", settings.reward.function_path
        yield "reward.custom_reward_function.name", settings.reward.function_name
    yield "trainer.project_name", "dsv4kit"
    yield "trainer.experiment_name", run_name
    yield "trainer.nnodes", schedule.nodes
    yield "trainer.n_gpus_per_node", settings.hardware.gpus_per_node
    yield "trainer.device", settings.hardware.device
    yield "trainer.save_freq", schedule.save_freq
    yield "trainer.resume_mode", "auto"
    yield "trainer.default_local_dir", checkpoint_dir(settings, run_dir)
    # The cluster already runs, and Ray refuses a CPU count for a cluster it only joins.
    yield "ray_kwargs.ray_init.num_cpus", None


def deterministic(kit_dir: str) -> Mapping[str, Any]:
    """The hooks through which verl takes `dsv4kit.plugin.deterministic`."""
    return {
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": f"{kit_dir}/dsv4kit/plugin/deterministic.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop": "seeded_single_turn",
        "trainer.v1.sampler.custom_sampler.path": "pkg://dsv4kit.plugin.deterministic",
        "trainer.v1.sampler.custom_sampler.name": "OrderedReplayBuffer",
    }


def checkpoint_dir(settings: Settings, run_dir: str) -> str:
    """verl's `default_local_dir`: `checkpoints/` in the run unless the settings say otherwise."""
    return settings.checkpoint.directory or f"{run_dir}/checkpoints"
