"""Overrides checked against verl's real configuration tree: hydra-core and the wheel's YAML, verl not imported.

What this catches: unknown keys, keys of the wrong group, interpolations that do not resolve, mandatory values left out.
What only verl's dataclasses catch: wrong types and enum values.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4kit import quoting
from dsv4kit.config.tree import leaves
from dsv4kit.errors import UserError, nearest

# Children of these are passed on by verl to somebody else's keyword arguments, so any name may stand there.
OPEN = (
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.rollout.engine_kwargs",
    "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs",
    "actor_rollout_ref.actor.optim.override_optimizer_config",
    "actor_rollout_ref.actor.megatron.override_ddp_config",
    "actor_rollout_ref.actor.megatron.override_mcore_model_config",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
    "actor_rollout_ref.ref.megatron.override_transformer_config",
    "actor_rollout_ref.actor.checkpoint.mbridge_config",
    "data.apply_chat_template_kwargs",
    "ray_kwargs.ray_init",
    "reward.reward_kwargs",
    "trainer.v1.sampler.sampler_kwargs",
)
# Real fields of verl's dataclasses that its YAML leaves out.
UNLISTED = ("actor_rollout_ref.rollout.enable_sleep_mode",)
# Left open in every healthy configuration.
OPTIONAL_MISSING = ("reward.reward_model.rollout.name",)


class Tree:
    """verl's configuration tree as one wheel has it."""

    def __init__(self, config_name: str) -> None:
        self.config_name = config_name
        self._keys: dict[str, Any] | None = None

    def render(self, pairs: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> list[str]:
        """`pairs` as Hydra overrides, checked: composed with the real tree and resolved.

        Raises UserError for a key verl does not know; `sources` says where a pair came from, for that message.
        """
        overrides = [f"{self._prefix(key, sources or {})}{key}={quoting.hydra(value)}" for key, value in pairs.items()]
        self._compose(overrides)
        return overrides

    def keys(self) -> Mapping[str, Any]:
        """Every key of the tree with its default, groups included."""
        if self._keys is None:
            from omegaconf import OmegaConf

            container: Any = OmegaConf.to_container(_compose(self.config_name, []), resolve=False)
            self._keys = dict(leaves(container))
            for key in list(self._keys):
                while "." in key:
                    key = key.rpartition(".")[0]
                    self._keys.setdefault(key, {})
        return self._keys

    def _prefix(self, key: str, sources: Mapping[str, str]) -> str:
        """`+` for a new key where new keys are allowed, nothing for one that exists."""
        known = self.keys()
        if key in known:
            return ""
        if key in UNLISTED or any(key.startswith(f"{parent}.") for parent in OPEN):
            return "++"
        raise UserError(
            f"{sources.get(key, 'verl')}: verl's {self.config_name} has no key {key!r}{nearest(key, known)}"
        )

    def _compose(self, overrides: list[str]) -> None:
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            config = _compose(self.config_name, overrides)
            missing = [key for key in OmegaConf.missing_keys(config) if key not in OPTIONAL_MISSING]
            OmegaConf.to_container(config, resolve=True)
        except (HydraException, OmegaConfBaseException) as error:
            line = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"verl's {self.config_name} refuses the overrides: {line}") from None
        if missing:
            raise UserError(f"verl's {self.config_name} needs a value for {', '.join(sorted(missing))}")


def _compose(config_name: str, overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(_config_dir()), version_base=None):
        return compose(config_name, overrides=overrides)


def _config_dir() -> Path:
    """The YAML of the installed verl wheel; verl itself stays unimported."""
    try:
        located = importlib.metadata.distribution("verl").locate_file("verl/trainer/config")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("verl's configuration is not installed; run `make setup`") from None
    return Path(str(located)).resolve()
