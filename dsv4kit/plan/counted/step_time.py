"""How long a step takes: each part a latency floor and the larger of what compute, memory and network allow (roofline).

What the GPUs, links and networks could do stands in the hardware file; how much of it is reached, and the floors, are
fitted to the published runs or guessed (`coefficients.yaml`). Generation is one decode step per token of the longest
response; training is pipeline slots of the slowest stage; Adam runs on the CPU at a rate per parameter that a node
owns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.counted.inputs import Question, RolloutSplit
from dsv4kit.plan.counted.rollout import kv_bytes_per_token, weights_gb
from dsv4kit.plan.counted.shards import Share, state_bytes
from dsv4kit.plan.counted.units import GB

# Decoder layers of the model that decoding was measured with.
REFERENCE_LAYERS = 61
# A forward pass is 1; the backward pass is 2, and 1 more where activations are computed again.
_FORWARD, _BACKWARD = 1, 2
# Bytes Adam reads and writes per parameter on the GPU: parameter, gradient and two moments read, three of them written.
_ADAM_BYTES = 28
# verl moves weights to the GPU for the weight update, the log-probabilities and the training of a step, and back.
_WEIGHT_TRIPS = 3


class StepTime(NamedTuple):
    """Seconds of one step; `first_s` with an empty kernel cache, `first_warm_s` with a full one.

    `tokens` are those of a step, prompts included; `flops` what the model needs for them, 6 per active parameter.
    """

    generation_s: float
    update_weights_s: float
    log_probs_s: float
    update_s: float
    optimizer_s: float
    validation_s: float
    first_extra_s: float
    first_extra_warm_s: float
    tokens: float
    generated: float
    flops: float
    gpus: int
    peak_flops: float

    @property
    def train_s(self) -> float:
        """Everything but generation, its weights, and validation."""
        return self.log_probs_s + self.update_s + self.optimizer_s

    @property
    def steady_s(self) -> float:
        """Every step but the first of a segment; a validation counts with its share of the steps between two."""
        return self.generation_s + self.update_weights_s + self.train_s + self.validation_s

    @property
    def first_s(self) -> float:
        """First step of a segment that compiles its kernels."""
        return self.steady_s + self.first_extra_s

    @property
    def first_warm_s(self) -> float:
        """First step of a segment that finds them."""
        return self.steady_s + self.first_extra_warm_s

    @property
    def tokens_per_gpu_s(self) -> float:
        """Tokens of a step per GPU and second."""
        return self.tokens / self.gpus / self.steady_s

    @property
    def generated_per_gpu_s(self) -> float:
        """Generated tokens per GPU and second of generation; 0 where nothing is generated."""
        return self.generated / self.gpus / self.generation_s if self.generation_s else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the GPUs could have done in the training part."""
        return self.flops / (self.gpus * self.peak_flops * self.train_s)


def remote_share(q: Question) -> float:
    """The share of the weights that lies on other pipeline stages than one's own."""
    return 1 - 1 / q.parallel.pipeline


def transfer_s(q: Question, c: Coefficients) -> float:
    """Gathering all weights in bf16 once: what a weight update, and the export of a checkpoint, cost.

    Those of other stages travel once more.
    """
    further = c.for_hardware("refit_stage_factor", q.hardware.name) * remote_share(q)
    return 2 * geo.totals(q.geometry).main / GB / c.of("refit_gb_per_s") * (1 + further)


def _all_to_all_s(q: Question, tokens: float, group: int, c: Coefficients) -> float:
    """Seconds of one layer's dispatch and combine of `tokens` on each GPU, experts over `group` GPUs."""
    if group == 1:
        return 0.0
    size = 2 * tokens * q.geometry.experts_per_token * q.geometry.hidden_size * 2 / GB
    outside = max(0.0, 1 - q.hardware.nvlink_domain_gpus / group)
    within = size * (1 - outside) / q.hardware.nvlink_gb_per_s
    return max(within, size * outside / q.hardware.network_gb_per_s) / c.of("network_efficiency")


def generation_bound_s(q: Question, r: RolloutSplit, c: Coefficients) -> tuple[float, float]:
    """Decode steps of a training step, and seconds of one beside the latency floor: memory, compute or network."""
    g, h = q.geometry, q.hardware
    ranks = q.parallel.world // r.tensor
    per_rank = -(-q.work.sequences // ranks)
    running = min(per_rank, r.max_sequences or per_rank)
    waves = -(-per_rank // running)
    experts, dense, head = weights_gb(g, r)
    touched = 1 - (1 - g.experts_per_token / g.num_experts) ** (running * r.data)
    context = running * kv_bytes_per_token(g, r.kv_bytes) * q.work.mean_tokens / GB
    memory = (dense + head + experts * touched + context) / (1000 * h.hbm_tb_per_s) / c.of("memory_efficiency")
    compute = 2 * geo.totals(g).active * running / r.tensor / (h.tflops * 1e12 * c.of("compute_efficiency"))
    network = g.num_layers * _all_to_all_s(q, running / r.tensor, r.expert, c)
    return waves * q.work.response_tokens, max(memory, compute, network)


def prefill_s(q: Question, c: Coefficients) -> float:
    """Reading all prompts, which computing bounds."""
    tokens = q.work.sequences * q.work.prompt_tokens / q.parallel.world
    return 2 * geo.totals(q.geometry).active * tokens / (q.hardware.tflops * 1e12 * c.of("compute_efficiency"))


def _generation_s(q: Question, c: Coefficients) -> float:
    if q.rollout is None:
        return 0.0
    steps, bound = generation_bound_s(q, q.rollout, c)
    floor = c.for_hardware("decode_s_per_token", q.hardware.name) * q.geometry.num_layers / REFERENCE_LAYERS
    return steps * (floor + bound) + prefill_s(q, c)


def layers_of(share: Share) -> int:
    """Layers a micro-batch passes on the stage, MTP's among them."""
    return len(share.layers) + share.mtp


def slot_bound_s(q: Question, share: Share, c: Coefficients) -> float:
    """One micro-batch's forward pass through the stage beside its latency floor: compute, memory or network."""
    h, tokens = q.hardware, q.work.micro_batch_tokens
    compute = 2 * share.active * tokens / (h.tflops * 1e12 * c.of("compute_efficiency"))
    memory = 2 * share.held / (h.hbm_tb_per_s * 1e12 * c.of("memory_efficiency"))
    network = layers_of(share) * _all_to_all_s(q, tokens, q.parallel.expert, c)
    if q.parallel.context > 1:
        # Every rank sees the shared keys and values of the others.
        gathered = tokens * (q.parallel.context - 1) * q.geometry.head_dim * 2 / GB
        network += layers_of(share) * gathered / h.network_gb_per_s / c.of("network_efficiency")
    return max(compute, memory, network)


def _slot_s(q: Question, shares: Sequence[Share], c: Coefficients) -> float:
    """One micro-batch's forward pass through the slowest stage, the pipeline's clock."""
    floor = c.of("layer_floor_s")
    return max(floor * layers_of(share) + slot_bound_s(q, share, c) for share in shares)


def slots(q: Question, updates: int = 1) -> float:
    """Pipeline slots of one pass over the sequences of an update, with their mean length: micro-batches and bubble."""
    tokens = q.work.sequences / updates * q.work.mean_tokens / q.parallel.context
    return max(1, math.ceil(tokens / (q.parallel.data * q.work.micro_batch_tokens) - 1e-9)) + q.parallel.pipeline - 1


def update_slots(q: Question) -> float:
    """Forward passes through a stage, a slot each, of the updates of a step."""
    passes = _FORWARD + _BACKWARD + q.training.recompute
    return q.training.epochs * q.training.updates * slots(q, q.training.updates) * passes


def log_prob_slots(q: Question) -> float:
    """The same of log-probabilities, those of a reference policy among them; none in SFT."""
    return slots(q) * (1 + q.training.reference) if q.recipe == "grpo" else 0.0


def moves_s(q: Question, shares: Sequence[Share], c: Coefficients) -> float:
    """What verl moves between host and GPU in a step."""
    levers = q.levers
    held = max(share.held for share in shares) * (1 + q.training.reference) if levers.param_offload else 0
    state = max(share.state for share in shares) * state_bytes(levers) if levers.optimizer_offload else 0
    return 2 * (_WEIGHT_TRIPS * 2 * held + state) / GB / q.hardware.host_link_gb_per_s / c.of("network_efficiency")


def cpu_states(q: Question, shares: Sequence[Share]) -> float:
    """Parameters of the fullest node whose Adam runs on its CPUs, over all updates of a step."""
    owned = max(share.state for share in shares) * q.parallel.gpus_per_node
    return owned * q.levers.on_cpu * q.training.updates * q.training.epochs


def gpu_adam_s(q: Question, shares: Sequence[Share], c: Coefficients) -> float:
    """Adam of what is on the GPU."""
    state = max(share.state for share in shares) * (1 - q.levers.on_cpu)
    once = _ADAM_BYTES * state / (q.hardware.hbm_tb_per_s * 1e12 * c.of("memory_efficiency"))
    return once * q.training.updates * q.training.epochs


def step_time(q: Question, shares: Sequence[Share], c: Coefficients) -> StepTime:
    """The parts of a step."""
    hardware, work = q.hardware.name, q.work
    generation, slot = _generation_s(q, c), _slot_s(q, shares, c)
    tokens = work.sequences * work.mean_tokens
    active = geo.totals(q.geometry).active
    on_cpu = cpu_states(q, shares) * c.for_hardware("cpu_adam_s_per_parameter", hardware)
    return StepTime(
        generation_s=generation,
        update_weights_s=transfer_s(q, c) if q.rollout else 0.0,
        log_probs_s=log_prob_slots(q) * slot,
        update_s=update_slots(q) * slot,
        optimizer_s=on_cpu + gpu_adam_s(q, shares, c) + moves_s(q, shares, c),
        validation_s=generation / q.training.validate_every if q.training.validate_every else 0.0,
        first_extra_s=c.for_hardware("first_step_extra_s", hardware),
        first_extra_warm_s=c.of("first_step_extra_warm_s"),
        tokens=tokens,
        generated=tokens - work.sequences * work.prompt_tokens if q.rollout else 0.0,
        flops=6 * active * tokens * q.training.epochs,
        gpus=q.parallel.world,
        peak_flops=q.hardware.tflops * 1e12,
    )
