"""How long a step takes: generation, weight transfer, and the rest.

Two published runs, so this takes them apart rather than explaining them: generation is one decode latency per token of
the longest response, the weight transfer a rate, the rest (log-probabilities, training, CPU Adam, moves to and from the
host) a number per hardware. Away from those runs each is scaled as its cost would be, and said to be extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.gpu_memory import micro_batches
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.counted.shards import Share
from dsv4kit.plan.counted.units import GB

# Decoder layers and active parameters of the models the times were measured with: Pro's layers for decoding, Flash's
# parameters for SFT.
REFERENCE_LAYERS = 61
REFERENCE_ACTIVE = 13.27e9
# Up to this depth the weights are gathered at a rate of their own.
SHALLOW_PIPELINE = 4


class StepTime(NamedTuple):
    """Seconds of one step; `first_s` with an empty kernel cache, `first_warm_s` with a full one."""

    generation_s: float
    update_weights_s: float
    train_s: float
    first_extra_s: float
    first_extra_warm_s: float

    @property
    def steady_s(self) -> float:
        """Every step but the first of a segment."""
        return self.generation_s + self.update_weights_s + self.train_s

    @property
    def first_s(self) -> float:
        """First step of a segment that compiles its kernels."""
        return self.steady_s + self.first_extra_s

    @property
    def first_warm_s(self) -> float:
        """First step of a segment that finds them."""
        return self.steady_s + self.first_extra_warm_s


def transfer_s(q: Question, c: Coefficients) -> float:
    """Gathering all weights in bf16 once: what a weight update, and the export of a checkpoint, cost."""
    if q.parallel.pipeline <= SHALLOW_PIPELINE:
        rate = c.of("update_weights_shallow_gb_per_s")
    else:
        rate = c.for_hardware("update_weights_gb_per_s", q.hardware.name)
    return 2 * geo.totals(q.geometry).main / GB / rate


def pipeline_work(q: Question, shares: Sequence[Share]) -> float:
    """Tokens x active parameters of the heaviest stage x pipeline slots: what the pipeline's clock follows."""
    slots = micro_batches(q) + q.parallel.pipeline - 1
    return max(share.active for share in shares) * slots * q.work.micro_batch_tokens


def _scaleout(q: Question, c: Coefficients) -> float:
    """What an expert group that spans several NVLink domains costs the pipeline."""
    domains = max(1.0, q.parallel.expert / q.hardware.nvlink_domain_gpus)
    return math.pow(c.of("expert_scaleout_factor"), math.log2(domains))


def step_time(q: Question, shares: Sequence[Share], c: Coefficients) -> StepTime:
    """The parts of a step."""
    hardware = q.hardware.name
    if q.recipe == "sft":
        active = geo.totals(q.geometry).active / REFERENCE_ACTIVE
        tokens = q.work.sequences * q.work.sequence_tokens
        generation, transfer = 0.0, 0.0
        train = c.of("sft_s_per_token_per_gpu") * active * tokens / q.parallel.world * _scaleout(q, c)
    else:
        layers = q.geometry.num_layers / REFERENCE_LAYERS
        generation = c.for_hardware("decode_s_per_token", hardware) * layers * q.work.response_tokens
        transfer = transfer_s(q, c)
        pipeline = pipeline_work(q, shares) / c.for_hardware("train_pipeline_reference", hardware)
        state = max(share.state for share in shares) / c.for_hardware("train_state_reference", hardware)
        part = c.of("train_pipeline_share")
        spread = _scaleout(q, c)
        train = c.for_hardware("train_s", hardware) * (part * pipeline * spread + (1 - part) * state)
    return StepTime(
        generation_s=generation,
        update_weights_s=transfer,
        train_s=train,
        first_extra_s=c.for_hardware("first_step_extra_s", hardware),
        first_extra_warm_s=c.of("first_step_extra_warm_s"),
    )
