"""What a run needs of the packages in its image, as data: looked for in the image by `dsv4kit.plugin.needs`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsv4kit.config.schema import Settings
from dsv4kit.verl_keys.pairs import is_sft

_FUSION = "apply_dsa_kernel_fusion"
_EXPERTS = "actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend"
_OVERRIDE = ".override_transformer_config."


def asked(settings: Settings) -> dict[str, Any]:
    """What the packages have to be able to do: the `asked` of `plugin.found.clashes`. Nothing without Megatron."""
    if settings.engine.backend != "megatron" or settings.hardware.device != "cuda":
        return {}
    by_hand = any(value for key, value in settings.verl.items() if key.endswith(_FUSION))
    found: dict[str, Any] = {
        "sm": settings.hardware.sm_architecture,
        "fused_attention": bool(settings.kernels.dsa_fusion or by_hand),
    }
    if not is_sft(settings):
        found["moe_backend"] = settings.kernels.moe_backend or settings.verl.get(_EXPERTS)
        found["data_parallel"] = settings.parallel.rollout.data_parallel_size
    return found


def of_run(settings: Settings, overrides: Iterable[str]) -> dict[str, Any]:
    """What every node looks for before a segment; `overrides` are verl's, as the driver gets them. Empty: nothing."""
    if not (wanted := asked(settings)):
        return {}
    keys = (word.lstrip("+").partition("=")[0].partition(_OVERRIDE)[2] for word in overrides)
    return {
        "model": settings.model.name,
        "recipe": settings.recipe.name,
        "fields": list(dict.fromkeys(key.partition(".")[0] for key in keys if key)),
        "asked": wanted,
    }
