"""Host memory a node must have available before a run starts on it: a setting, else computed by the planner."""

from __future__ import annotations

import math

from dsv4kit.config.schema import Settings
from dsv4kit.errors import UserError
from dsv4kit.plan.core import Plan
from dsv4kit.plan.counted.units import GB, GIB

# Above the planner's peak of the fullest node. It reproduces the published peaks within 5 %; more would turn healthy
# nodes away.
_MARGIN = 1.05
_STEP_GIB = 10


def needed_gib(settings: Settings, plan: Plan | None) -> float:
    """GiB that must be available on every node: `hardware.min_memory_gib`, else what `plan` counts on the fullest node.

    The latter with 5 % more, in steps of 10 GiB, but not above the node's own memory: a run that was forced is not
    refused again by every node. Raises UserError where there is neither a setting nor a plan.
    """
    given = settings.hardware.min_memory_gib
    if given is not None:
        return given
    if plan is None:
        raise UserError(
            f"hardware.min_memory_gib: not set, and the planner cannot compute it for {settings.model.name} on"
            f" {settings.hardware.name}; SET=hardware.min_memory_gib=... says it"
        )
    node = plan.memory.fullest_node
    wanted = math.ceil(node.physical_gb * GB / GIB * _MARGIN / _STEP_GIB) * _STEP_GIB
    return min(float(wanted), node.limit_gb * GB / GIB)
