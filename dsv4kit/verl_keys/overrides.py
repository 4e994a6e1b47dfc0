"""From settings to verl's configuration keys: which key carries which value, and which setting decides it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsv4kit.config.schema import Settings
from dsv4kit.config.tree import leaves
from dsv4kit.errors import UserError
from dsv4kit.run.directory import RunDir
from dsv4kit.verl_keys import grpo, sft
from dsv4kit.verl_keys.features import Features, features_of
from dsv4kit.verl_keys.pairs import Pair, Pairs, is_sft

# What makes a run a chain of resumable segments; the value is the setting or variable that decides it.
OWNED = {
    "trainer.total_training_steps": "STEPS and SEGMENT_STEPS",
    "trainer.total_epochs": "STEPS: as many epochs as steps, so that epochs never end a run (verl then saves nothing)",
    "trainer.save_freq": "SAVE_FREQ",
    "trainer.nnodes": "NODES",
    "trainer.n_gpus_per_node": "the hardware",
    "trainer.device": "the hardware",
    "trainer.logger": "LOGGER",
    "trainer.resume_mode": "the checkpoints of the run",
    "trainer.resume_from_path": "the checkpoints of the run",
    "trainer.default_local_dir": "SET=checkpoint.directory=...",
    "ray_kwargs.ray_init.num_cpus": "the hardware",
}


class Overrides(NamedTuple):
    """The keys of one run with their values, and where each value comes from (a settings key)."""

    pairs: dict[str, Any]
    settings: dict[str, str]


def build(
    settings: Settings,
    *,
    run_name: str,
    model_path: str,
    data_dir: str,
    run_dir: str,
    kit_dir: str,
    layout: str | None = None,
) -> dict[str, Any]:
    """All verl keys of a run, dotted, except the last step of a segment, which is known only when the segment starts.

    `model_path` and `data_dir` (holding train.parquet and test.parquet) stand in where the profile leaves them to the
    kit; `kit_dir` is the run's frozen copy of the kit; `layout` is the pipeline layout the planner makes.
    """
    return traced(settings, run_name, model_path, data_dir, run_dir, kit_dir, layout).pairs


def traced(
    settings: Settings,
    run_name: str,
    model_path: str,
    data_dir: str,
    run_dir: str,
    kit_dir: str,
    layout: str | None = None,
) -> Overrides:
    """As `build`, with the setting behind each key."""
    features = features_of(settings.engine.verl)
    typed = {pair.key: pair for pair in _typed(settings, features, run_name, model_path, data_dir, run_dir, layout)}
    _refuse_clashes(settings, typed)
    pairs: dict[str, Any] = {key: pair.value for key, pair in typed.items()}
    if settings.deterministic and not is_sft(settings):
        pairs |= deterministic(kit_dir)
    origins = {key: pair.setting for key, pair in typed.items()} | {key: f"verl.{key}" for key in settings.verl}
    return Overrides(pairs | settings.verl, origins)


def _refuse_clashes(settings: Settings, typed: Mapping[str, Pair]) -> None:
    """A raw key may not contradict the setting that checks and plan go by."""
    for key in _spelt_out(settings.verl):
        if key.startswith(("hydra.", "hydra/")):
            raise UserError(f"verl.{key}: Hydra's own settings are the kit's")
        if owner := next((owned for owned in OWNED if f"{key}.".startswith(f"{owned}.")), None):
            raise UserError(f"verl.{key}: the kit sets this key itself, from {OWNED[owner]}")
        if settings.engine.backend == "megatron" and key in typed:
            raise UserError(f"verl.{key}: the kit sets this key itself, from SET={typed[key].setting}=...")


def _spelt_out(verl: Mapping[str, Any]) -> Iterator[str]:
    """Every key that is set, also within a mapping; a section set to nothing sets all that is in it."""
    for key, value in verl.items():
        below = [owned for owned in OWNED if owned.startswith(f"{key}.")]
        if isinstance(value, Mapping):
            yield from (inner for inner, _ in leaves({key: value}))
        elif below:
            yield below[0]
        yield key


def _typed(
    settings: Settings,
    features: Features,
    run_name: str,
    model_path: str,
    data_dir: str,
    run_dir: str,
    layout: str | None,
) -> Iterator[Pair]:
    recipe = sft if is_sft(settings) else grpo
    yield from recipe.pairs(settings, features, model_path, data_dir, layout)
    yield from _trainer(settings, run_name, run_dir)
    if not is_sft(settings):
        # The cluster already runs, and Ray refuses a CPU count for a cluster it only joins.
        yield Pair("ray_kwargs.ray_init.num_cpus", None, "hardware.cpus_per_node")


def _trainer(settings: Settings, run_name: str, run_dir: str) -> Pairs:
    """What both trainers call the same."""
    schedule = settings.schedule
    yield Pair("trainer.project_name", settings.tracking.project, "tracking.project")
    yield Pair("trainer.experiment_name", settings.tracking.experiment or run_name, "tracking.experiment")
    yield Pair("trainer.nnodes", schedule.nodes, "schedule.nodes")
    yield Pair("trainer.n_gpus_per_node", settings.hardware.gpus_per_node, "hardware.gpus_per_node")
    yield Pair("trainer.device", settings.hardware.device, "hardware.device")
    yield Pair("trainer.save_freq", schedule.save_freq, "schedule.save_freq")
    yield Pair("trainer.resume_mode", "auto", "checkpoint.directory")
    yield Pair("trainer.default_local_dir", checkpoint_dir(settings, run_dir), "checkpoint.directory")
    yield Pair("trainer.logger", loggers(settings), "loggers")


def loggers(settings: Settings) -> list[str]:
    """The user's loggers, and the two the kit itself reads."""
    wanted: list[str] = ["console", "file", *settings.loggers]
    return list(dict.fromkeys(wanted))


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
    return settings.checkpoint.directory or str(RunDir(Path(run_dir)).checkpoints)
