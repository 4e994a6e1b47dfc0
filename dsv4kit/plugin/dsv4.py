"""The plugin for training DeepSeek-V4 with verl's Megatron engine: installs every patch, imports nothing heavy.

    VERL_USE_EXTERNAL_MODULES=dsv4kit.plugin.dsv4

in the environment of all processes that import verl. One page per patch: docs/fixes/. What a given image makes of it
(one JSON row per patch, exit code 1 when a required one cannot be applied)::

    python -m dsv4kit.plugin.dsv4
"""

from __future__ import annotations

import json
import sys
from types import ModuleType

from dsv4kit.plugin.patching import REGISTRY, Patch, PatchError, PatchResult, State

OPTIMIZER_SWITCH = "VERL_MEGATRON_OPTIMIZER_COMPAT"
"""The name upstream's own version of fixes A and B uses (verl #8383)."""
STATE_SWITCH = "DSV4KIT_OPTIMIZER_STATE"
MASTERS_SWITCH = "DSV4KIT_RESUME_MASTERS"
FIDELITY_SWITCH = "DSV4KIT_FIDELITY"
MTP_SWITCH = "DSV4KIT_MTP_COMPAT"
GATE_SWITCH = "DSV4KIT_PATCH_GATE"

_OPTIMIZER = "megatron.core.optimizer"
_CHECKPOINT = "verl.utils.checkpoint"
_ENGINE = "verl.workers.engine"
_HERE = "dsv4kit.plugin"

MEGATRON = (
    ("no-grad main parameters", f"{_OPTIMIZER}.distrib_optimizer", "megatron_optimizer:no_grad_main_params", True),
    ("gradient norm per dtype", f"{_OPTIMIZER}.clip_grads", "megatron_optimizer:grad_norm_per_dtype", True),
    ("gradient clipping per dtype", f"{_OPTIMIZER}.clip_grads", "megatron_optimizer:clipping_per_dtype", True),
)
STATE = (
    (
        "optimizer state keeps to its parameter",
        f"{_OPTIMIZER}.distrib_optimizer",
        "optimizer_state:order_params",
        True,
    ),
    (
        "offloaded optimizer loads mixed dtypes",
        f"{_OPTIMIZER}.cpu_offloading.hybrid_optimizer",
        "optimizer_state:load_mixed_dtypes",
        True,
    ),
    ("Adam's step count is kept", f"{_OPTIMIZER}.distrib_optimizer", "optimizer_state:keep_step", True),
    (
        "offloaded optimizer takes over loaded state",
        f"{_OPTIMIZER}.distrib_optimizer",
        "optimizer_state:sync_after_load",
        True,
    ),
    (
        "offloaded optimizer steps every parameter",
        f"{_OPTIMIZER}.cpu_offloading.hybrid_optimizer",
        "optimizer_state:step_every_param",
        True,
    ),
)
MASTERS = (
    (
        "masters refreshed after a model-only load",
        f"{_CHECKPOINT}.megatron_checkpoint_manager",
        "resume_masters:refresh_after_load",
        True,
    ),
)
# After MASTERS: the guard must see what the refreshed masters are.
FIDELITY = (
    (
        "fidelity guard, Megatron checkpoints",
        f"{_CHECKPOINT}.megatron_checkpoint_manager",
        "fidelity_hooks:guard_checkpoints",
        True,
    ),
    (
        "fidelity guard, FSDP checkpoints",
        f"{_CHECKPOINT}.fsdp_checkpoint_manager",
        "fidelity_hooks:guard_checkpoints",
        False,
    ),
    (
        "fidelity guard, Megatron first step",
        f"{_ENGINE}.megatron.transformer_impl",
        "fidelity_hooks:guard_megatron_step",
        True,
    ),
    ("fidelity guard, FSDP first step", f"{_ENGINE}.fsdp.transformer_impl", "fidelity_hooks:guard_fsdp_step", False),
)
MTP = (("MTP tolerates extra arguments", "verl.models.mcore.mtp_patch", "mtp:tolerate_extra_arguments", False),)


def install() -> None:
    """Registers every patch; applies those whose target is imported already. Safe to call twice."""
    for switch, patches in (
        (OPTIMIZER_SWITCH, MEGATRON),
        (STATE_SWITCH, STATE),
        (MASTERS_SWITCH, MASTERS),
        (FIDELITY_SWITCH, FIDELITY),
        (MTP_SWITCH, MTP),
    ):
        for name, target, function, required in patches:
            REGISTRY.add(Patch(name, target, f"{_HERE}.{function}", required, switch))
    # Last: whoever imports the engine is about to build the optimizer.
    REGISTRY.add(
        Patch(
            "every Megatron patch decided",
            f"{_ENGINE}.megatron.transformer_impl",
            f"{_HERE}.dsv4:gate",
            True,
            GATE_SWITCH,
        )
    )


def gate(_engine: ModuleType) -> PatchResult:
    """Refuses an engine some required patch of which has found no target (a module that was moved or renamed)."""
    REGISTRY.settle("megatron")
    return PatchResult(State.APPLIED)


def main() -> int:
    """Imports every target and prints the report."""
    code = 0
    try:
        REGISTRY.settle()
    except PatchError:
        code = 1
    for row in REGISTRY.report():
        print(json.dumps(row))
    return code


install()

if __name__ == "__main__":
    sys.exit(main())
