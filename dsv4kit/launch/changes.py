"""What a run may have otherwise from its next segment on, and what that changes in what its nodes are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4kit.config.frozen import frozen_settings
from dsv4kit.config.loading import Override, Resolved, load_site, validate
from dsv4kit.config.schema import Settings
from dsv4kit.config.site import Site
from dsv4kit.config.tree import assign, leaves
from dsv4kit.errors import UserError
from dsv4kit.launch import site_choice

Diff = dict[str, tuple[Any, Any]]

# Settings and groups of settings that touch neither what is learned nor what a checkpoint holds.
_FREE = (
    "schedule.time",
    "schedule.steps",
    "schedule.segment_steps",
    "schedule.spare_segments",
    "schedule.save_freq",
    "checkpoint.keep_last",
    "checkpoint.keep_every",
    "checkpoint.keep_best",
    "watch.",
    "ray.",
    "kernel_cache.",
    "env.",
    "loggers",
    "hardware.min_memory_gib",
    "hardware.min_shm_gib",
    "optimizer.param_offload",
    "optimizer.optimizer_offload",
    "engine.full_recompute",
    "engine.recompute_num_layers",
    "tracking.",
)
# These change how sums are grouped or what runs side by side: the same mathematics, other last digits.
_OTHER_DIGITS = (
    "parallel.actor.micro_batch_tokens",
    "parallel.rollout.gpu_memory_utilization",
    "parallel.rollout.max_num_batched_tokens",
    "rollout.max_model_len",
    "rollout.max_num_seqs",
)
_LAYOUT = (
    "schedule.nodes",
    "parallel.",
    "hardware.gpus_per_node",
    "engine.backend",
    "rollout.tensor_model_parallel_size",
)
# Keys of node.json without which an older kit does the same, only slower.
_AIDS = ("kernels",)
# Of the model, what is read at a start and is no part of a checkpoint.
_MODEL_FILES = ("model.path", "model.chat_template_file")
# Megatron's optimizer on the CPU, on the GPU, and the precision-aware one keep states of different shape.
_OPTIMIZER_STATE = ("optimizer.cpu_offload", "optimizer.offload_fraction", "optimizer.precision_aware")


@dataclass(frozen=True)
class Asked:
    """What the user wants otherwise; nothing by default."""

    overrides: Sequence[Override] = ()
    site: str | None = None
    image: str | None = None
    queue: Mapping[str, str | None] = field(default_factory=dict)
    new_kit: bool = False

    def of_site(self, site: Site) -> Site:
        """The site the next segments run on."""
        if site.name == "sandbox" and (self.site or self.image):
            name = "SITE" if self.site else "IMAGE"
            raise UserError(f"{name}: a run of the sandbox keeps the environment it began with")
        if self.site:
            site = load_site(self.site)
            if site.name == "sandbox":
                raise UserError(f"SITE={self.site!r}: the sandbox's Slurm knows nothing of this run's jobs")
        if self.image:
            site = site_choice.in_image(site, self.image)
        return site_choice.queued(site, self.queue)

    def of_settings(self, frozen: Mapping[str, Any], site: Site) -> tuple[Resolved, Diff]:
        """The settings of the next segments, and what is new in them. Refuses what a resume must not change."""
        before = frozen_settings(frozen["settings"])
        tree, sources = before.model_dump(), dict(frozen.get("sources") or {})
        image = site_choice.of_image(site) if self.image or self.site else []
        for override in [*image, *self.overrides]:
            tree = assign(tree, override.key, override.value, override.source, sources)
        after = validate(Settings, tree, sources)
        found = diff(before, after)
        for key in found:
            if reason := _refusal(key, after):
                raise UserError(f"{sources.get(key, key)}: {reason}")
        return Resolved(after, sources), found


def diff(before: Settings | Site, after: Settings | Site) -> Diff:
    """Dotted key -> value before and after, where they differ; None for one that is not there."""
    old, new = dict(leaves(before.model_dump())), dict(leaves(after.model_dump()))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def _refusal(key: str, settings: Settings) -> str | None:
    """Why a resume must not change the key; None where it may."""
    if _among(key, _FREE):
        return None
    if key in _OTHER_DIGITS:
        return "the run is deterministic, and this changes the last digits" if settings.deterministic else None
    loads = key in _OPTIMIZER_STATE and "optimizer" not in settings.checkpoint.contents
    return None if loads else not_loadable(key, settings) or "a resume changes nothing of what is learned"


def not_loadable(key: str, settings: Settings) -> str | None:
    """Why a checkpoint that was saved with another value of the key cannot be loaded; None where it can."""
    if _among(key, _FREE) or key in _OTHER_DIGITS:
        return None
    if _among(key, ("model.",)) and key not in _MODEL_FILES:
        return "a checkpoint goes on with its own model only"
    if key in _OPTIMIZER_STATE:
        if "optimizer" not in settings.checkpoint.contents:
            return None
        return "the run's checkpoints hold the optimizer's state, which has another form with this"
    if _among(key, _LAYOUT):
        if settings.engine.backend == "fsdp":
            return "FSDP's checkpoints have one file per process and load only into as many as saved them"
        return "Megatron's checkpoints of this form (dp_reshardable) load only into the layout that saved them"
    return None


def _among(key: str, names: Iterable[str]) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def unknown_to_kit(spec: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Keys of node.json that are to change and that the run's own kit, an older one, does not have."""
    return [key for key in after if key not in spec and before.get(key) != after[key] and key not in _AIDS]


def told(spec: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """`spec` (node.json as the run has it) with what differs between `before` and `after`, both made now.

    The run's own kit reads it, which may be an older one: no key is added to it, and none taken away.
    """
    found = dict(spec)
    for key in spec:
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(spec[key], dict) and isinstance(old, Mapping) and isinstance(new, Mapping):
            gone = old.keys() - new.keys()
            changed = {name: value for name, value in new.items() if old.get(name) != value}
            open_ended = key == "env"
            kept = {name: value for name, value in spec[key].items() if not (open_ended and name in gone)}
            found[key] = kept | {name: value for name, value in changed.items() if open_ended or name in kept}
        elif key == "overrides":
            found[key] = _rewritten(spec[key], list(old or []), list(new or []))
        else:
            found[key] = new
    return found


def _rewritten(words: Sequence[str], old: Sequence[str], new: Sequence[str]) -> list[str]:
    """verl's overrides with those replaced, taken out and added that differ between `old` and `new`."""
    keys = {word.partition("=")[0]: word for word in new}
    changed = {word.partition("=")[0] for word in {*old} ^ {*new}}
    kept = [keys.get(key, "") if (key := word.partition("=")[0]) in changed else word for word in words]
    there = {word.partition("=")[0] for word in words}
    return [word for word in kept if word] + [word for key, word in keys.items() if key in changed and key not in there]
