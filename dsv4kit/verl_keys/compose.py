"""Overrides checked against verl's real configuration tree: hydra-core and the wheel's YAML, verl not imported.

Where the keys and defaults of the tree are enough to say yes, they come from `composed`, without Hydra.

What this catches: unknown keys, keys of the wrong group, interpolations that do not resolve, mandatory values left out,
a text where the default is a number. What only verl's dataclasses catch: enum values, types where the default is null.

Keys of the tree are written `key=value`, so that Hydra itself refuses a misspelt one; below the dictionaries verl hands
on to somebody else, `++key=value`, which sets and adds alike. Group choices (`model_engine=megatron`) come first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dsv4kit import quoting
from dsv4kit.config.tree import leaves
from dsv4kit.errors import UserError, nearest
from dsv4kit.verl_keys import composed

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
    "engine.override_ddp_config",
    "engine.override_mcore_model_config",
    "engine.override_transformer_config",
    "model.override_config",
    "optim.override_optimizer_config",
    "trainer.v1.sampler.sampler_kwargs",
)
# What the tree itself has below them.
LISTED = frozenset(
    f"{engine}.override_transformer_config.{name}"
    for engine in ("actor_rollout_ref.actor.megatron", "engine")
    for name in (
        "recompute_granularity",
        "recompute_modules",
        "recompute_method",
        "recompute_num_layers",
        "attention_backend",
    )
) | {"ray_kwargs.ray_init.num_cpus", "ray_kwargs.ray_init.runtime_env.py_executable"}
# Real fields of verl's dataclasses that its YAML leaves out.
UNLISTED = ("actor_rollout_ref.rollout.enable_sleep_mode",)
# Left open in every healthy configuration.
OPTIONAL_MISSING = ("reward.reward_model.rollout.name",)
# Choices of the defaults list: what is chosen decides which keys there are.
GROUPS = {"ppo_trainer": ("model_engine",), "sft_trainer_engine": ("engine", "optim")}


class Tree:
    """verl's configuration tree as the wheel has it, with the keys the image's verl has besides (`added`) or lacks."""

    def __init__(self, config_name: str, added: Collection[str] = (), removed: Collection[str] = ()) -> None:
        self.config_name = config_name
        self._added, self._removed = added, removed
        self._keys: dict[str, Any] | None = None
        self._choices: list[str] = []

    def render(self, pairs: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> list[str]:
        """`pairs` as Hydra overrides, checked: composed with the real tree and resolved.

        Raises UserError for a key verl does not know; `sources` says where a pair came from, for that message.
        """
        groups = GROUPS.get(self.config_name, ())
        for key in pairs:
            if key in self._removed:
                raise UserError(f"{(sources or {}).get(key, 'verl')}: the image's verl has no key {key!r}")
        for key in groups:
            if key in pairs:
                _check_choice(key, pairs[key], (sources or {}).get(key, "verl"))
        self._choices = [f"{key}={pairs[key]}" for key in groups if key in pairs]
        rest = {key: value for key, value in pairs.items() if key not in groups}
        written = [(key, f"{key}={_quoted(key, value, sources or {})}") for key, value in rest.items()]
        if self._surely_composes(rest):
            return self._rendered(written)
        try:
            # A key the wheel's tree does not have yet is added for the check, and plain for the image.
            self._compose([*self._choices, *(("++" if self._new(key) else "") + text for key, text in written)])
        except UserError:
            self._refuse_unknown(rest, sources or {})
            self._refuse_misplaced(rest, sources or {})
            raise
        self._refuse_misplaced(rest, sources or {})
        return self._rendered(written)

    def _rendered(self, written: list[tuple[str, str]]) -> list[str]:
        return [*self._choices, *(("++" if _open(key) else "") + text for key, text in written)]

    def _surely_composes(self, pairs: Mapping[str, Any]) -> bool:
        """Whether it needs no composing to know; False says nothing."""
        try:
            path = composed.path_of(_config_dir(), self.config_name, self._choices)
        except (OSError, UserError):  # it works without a cache
            return False
        known = composed.load(path)
        if known is None:
            if (known := self._bare()) is None:
                return False
            composed.store(path, known)
        return known.accepts(pairs, self._new, OPTIONAL_MISSING)

    def _bare(self) -> composed.Composed | None:
        """The tree without overrides; None where it does not compose without them."""
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            config = _compose(self.config_name, self._choices)
            tree: Any = OmegaConf.to_container(config, resolve=False)
            resolved: Any = OmegaConf.to_container(config, resolve=True)
        except (HydraException, OmegaConfBaseException, ValueError):
            return None
        return composed.of(tree, resolved)

    def _new(self, key: str) -> bool:
        return _open(key) or key in self._added

    def _refuse_unknown(self, pairs: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        """Hydra stops at one bad key and names no other: the nearest known one is found here."""
        try:
            known = self.keys()
        except UserError:
            return
        for key in pairs:
            if key not in known and not self._new(key):
                raise UserError(
                    f"{sources.get(key, 'verl')}: verl's {self.config_name} has no key {key!r}{nearest(key, known)}"
                ) from None

    def _refuse_misplaced(self, pairs: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        """Hydra lets one value take the place of a whole group of keys, and a text that of a number; verl then fails
        when the nodes are up."""
        suspects = [key for key, value in pairs.items() if value is not None and not isinstance(value, Mapping)]
        try:
            known = self.keys() if suspects else {}
        except UserError:
            return
        for key in suspects:
            default, value = known.get(key), pairs[key]
            if isinstance(default, bool | int | float) and isinstance(value, str) and "$" not in value:
                wanted = "true or false" if isinstance(default, bool) else "a number"
                raise UserError(f"{sources.get(key, 'verl')}: {key}={value!r}: verl takes {wanted}, as {default!r}")
            if isinstance(default, Mapping):
                below = sorted(name for name in known if name.rpartition(".")[0] == key)[:4]
                raise UserError(
                    f"{sources.get(key, 'verl')}: {key}={value!r}: verl has a group of keys there"
                    f" ({', '.join([*below, '...'])}), which one value cannot replace"
                )

    def keys(self) -> Mapping[str, Any]:
        """Every key of the tree with its default, groups included; the tree is that of the last group choices."""
        if self._keys is None:
            from hydra.errors import HydraException
            from omegaconf import OmegaConf

            try:
                composed = _compose(self.config_name, self._choices)
            except HydraException as error:
                raise UserError(f"verl's {self.config_name}: {_first_line(error)}") from None
            container: Any = OmegaConf.to_container(composed, resolve=False)
            self._keys = dict(leaves(container))
            for key in list(self._keys):
                while "." in key:
                    key = key.rpartition(".")[0]
                    self._keys.setdefault(key, {})
        return self._keys

    def _compose(self, overrides: list[str]) -> None:
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            config = _compose(self.config_name, overrides)
            resolved: Any = OmegaConf.to_container(config, resolve=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise UserError(f"verl's {self.config_name} refuses the overrides: {_first_line(error)}") from None
        missing = [key for key, value in leaves(resolved) if value == composed.MISSING and key not in OPTIONAL_MISSING]
        if missing:
            raise UserError(f"verl's {self.config_name} needs a value for {', '.join(sorted(missing))}")


def _quoted(key: str, value: Any, sources: Mapping[str, str]) -> str:
    try:
        return quoting.hydra(value)
    except TypeError as error:
        raise UserError(f"{sources.get(key, 'verl')}: {key}: {error}") from None


def _check_choice(group: str, choice: object, source: str) -> None:
    known = sorted(path.stem for path in (_config_dir() / group).glob("*.yaml"))
    if choice not in known:
        raise UserError(f"{source}: {group}={choice!r}: allowed: {', '.join(known)}{nearest(str(choice), known)}")


def _open(key: str) -> bool:
    below = any(key.startswith(f"{parent}.") for parent in OPEN)
    return key in UNLISTED or (below and key not in LISTED)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _compose(config_name: str, overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(_config_dir()), version_base=None):
        return compose(config_name, overrides=overrides)


def _config_dir() -> Path:
    """The YAML of the installed verl wheel; verl itself stays unimported."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("verl's configuration is not installed; run `make setup`")
    return Path(spec.submodule_search_locations[0], "trainer", "config").resolve()
