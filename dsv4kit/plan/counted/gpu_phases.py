"""What a GPU holds in each phase of a run: load, rollout, weight update (refit), log-probabilities, update, save.

What stays on the GPU while another phase runs follows from `param_offload` and `optimizer_offload` (verl
`engine_workers.py`: weights and gradients, and optimizer state, move to the host between phases). vLLM takes its share
of the whole GPU (`gpu_memory_utilization`), whoever else is on it: its start-up check of free memory fails where the
trainer's context and what is kept leave less.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.counted.units import GIB, MIB

LOAD, ROLLOUT, REFIT, LOG_PROBS, UPDATE, SAVE = "load", "rollout", "refit", "log-probs", "update", "save"


class Parts(NamedTuple):
    """What one GPU may hold, GiB; `activations_spread` is how far activations may be below and above."""

    weights: float
    gradients: float
    optimizer: float
    cast: float
    forward: float
    activations: float
    activations_spread: tuple[float, float]
    rollout_weights: float


class GpuPhase(NamedTuple):
    """One phase: what it takes, and the interval that is believed in."""

    name: str
    need_gib: float
    low_gib: float
    high_gib: float


def phases(q: Question, parts: Parts, c: Coefficients) -> tuple[GpuPhase, ...]:
    """The phases in their order."""
    arch = q.hardware.cpu_architecture
    base, context = c.of("gpu_base_gib"), c.of("gpu_context_gib", arch)
    own = [c.spread("gpu_base_gib"), c.spread("gpu_context_gib", arch)]
    sleeping, asleep = 0.0, []
    if q.rollout:
        sleeping, asleep = c.of("sleeping_rollout_gib"), [c.spread("sleeping_rollout_gib")]
    model_stays = 0.0 if q.levers.param_offload else parts.weights + parts.gradients
    state_stays = 0.0 if q.levers.optimizer_offload else parts.optimizer
    reference = parts.weights if q.training.reference else 0.0
    reference_stays = 0.0 if q.levers.param_offload else reference
    model = max(parts.weights, model_stays)

    def phase(name: str, held: float, *spreads: tuple[float, float]) -> GpuPhase:
        need = held + base + context + reference_stays
        below, above = (math.hypot(*(x[i] for x in (*own, *spreads))) for i in (0, 1))
        return GpuPhase(name, need, need - below, need + above)

    static = parts.weights + parts.gradients + parts.optimizer
    working = max(parts.activations, parts.cast)
    spread = parts.activations_spread
    slack = working - parts.activations
    activation = (max(0.0, spread[0] - slack) if not slack else 0.0, max(0.0, spread[1] - slack))
    found = [phase(LOAD, static)]
    if q.rollout:
        bucket = 2 * q.rollout.bucket_mb * MIB / GIB
        awake = q.rollout.utilization * q.hardware.hbm_gib
        found += [
            phase(ROLLOUT, awake + model_stays + state_stays),
            phase(REFIT, model + state_stays + parts.rollout_weights + bucket + sleeping, *asleep),
            phase(LOG_PROBS, model + state_stays + parts.forward + sleeping, *asleep, spread),
        ]
    found += [
        phase(UPDATE, static + working + sleeping, *asleep, activation),
        phase(SAVE, model + parts.optimizer + sleeping, *asleep),
    ]
    return tuple(found)
