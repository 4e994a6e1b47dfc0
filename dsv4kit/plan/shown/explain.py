"""The formulas with their numbers put in, for the fullest GPU, the fullest node, and the times."""

from __future__ import annotations

from dsv4kit.plan.core import Plan
from dsv4kit.plan.counted.host_memory import pinned_factor
from dsv4kit.plan.counted.rollout import kv_bytes_per_token
from dsv4kit.plan.counted.shards import gradient_bytes, state_bytes
from dsv4kit.plan.counted.units import GIB


def explain(plan: Plan) -> str:
    """Formulas, numbers, and the constants with kind and source."""
    return "\n\n".join("\n".join(part) for part in (_gpu(plan), _host(plan), _rest(plan), _constants(plan)))


def _gpu(plan: Plan) -> list[str]:
    q, c = plan.question, plan.coefficients
    m = plan.memory.fullest_stage
    s, p, hidden, tokens = m.share, q.parallel, q.geometry.hidden_size, q.work.micro_batch_tokens
    a1 = c.of("activation_bytes_per_token")
    stored = tokens * q.geometry.hyper_connections * hidden * 2
    context = c.of("gpu_context_gib", q.hardware.cpu_architecture)
    resident = c.of("sleeping_rollout_gib") if q.rollout else 0
    lines = [
        f"GPU, stage {s.stage} ({s.label}), the fullest:",
        f"  P = dense {s.dense / 1e9:.3f} + experts {s.expert / 1e9:.3f} = {s.held / 1e9:.3f} B parameters held",
        f"  S = {s.dense / 1e9:.3f}/{p.ranks_per_stage} + {s.expert / 1e9:.3f}/{p.expert_data} = {s.state / 1e9:.3f} B"
        " parameters whose optimizer state is owned",
        f"  weights      2 P = {m.weights_gib:.1f} GiB",
        f"  gradients    {gradient_bytes(q.levers)} P = {m.gradients_gib:.1f} GiB",
        f"  optimizer    {state_bytes(q.levers):g} S = {m.optimizer_gib:.1f} GiB",
        f"  cast         {'4' if m.cast_gib else '0'} S = {m.cast_gib:.1f} GiB, in the optimizer step only",
        f"  activations  {a1:.3g} x {hidden}/7168 x {tokens} tokens + {m.in_flight} micro-batches in flight x"
        f" {len(s.layers) + s.mtp} layers x {stored / GIB:.3f} GiB = {m.activations_gib:.1f} GiB",
        f"  peak = {m.static_gib:.1f} + max({m.activations_gib:.1f}, {m.cast_gib:.1f}) + {c.of('gpu_base_gib'):g}"
        f" = {m.peak_gib:.1f} GiB",
        f"  need = {m.peak_gib:.1f} + {context:g} context + {resident:g} sleeping rollout = {m.need_gib:.1f} of"
        f" {m.limit_gib:g} GiB",
    ]
    last = plan.memory.stages[-1]
    lines.append(f"  verl's metrics show the last stage only: {last.peak_gib:.1f} GiB")
    return lines


def _host(plan: Plan) -> list[str]:
    q = plan.question
    n = plan.memory.fullest_node
    f, k = q.levers.on_cpu, pinned_factor(q.geometry, q.levers)
    return [
        f"Host, {n.role}, the fullest:",
        f"  f = {f:g} of Adam on the CPU; pinned tensors take {k:.3f} of their size (powers of two)",
        f"  Adam moments {'and master ' if q.levers.precision_aware else ''}pageable = {n.optimizer_gb:.0f} GB",
        f"  parked by verl between phases = {n.parked_gb:.0f} GB",
        f"  gradients  4 x {k:.3f} x f per owned parameter = {n.pinned_gradients_gb:.0f} GB pinned",
        f"  masters    {'0, pageable where precision-aware' if q.levers.precision_aware else f'4 x {k:.3f} x f'} ="
        f" {n.pinned_master_gb:.0f} GB pinned",
        f"  weights    bf16, dense and expert buffer of each GPU rounded up = {n.pinned_weights_gb:.0f} GB pinned",
        f"  processes {n.base_gb:.0f}, head node's own {n.head_extra_gb:.0f}, sleeping rollout {n.rollout_gb:.0f} GB",
        f"  physical = {n.physical_gb:.0f} of {n.limit_gb:.0f} GB; shown as used = {n.reported_gb:.0f} GB",
    ]


def _rest(plan: Plan) -> list[str]:
    q, step, s = plan.question, plan.step, plan.segment
    lines = ["Rollout, checkpoint, time:"]
    if plan.memory.rollout and q.rollout:
        r = plan.memory.rollout
        lines.append(
            f"  rollout: {r.budget_gb:.1f} GB granted - experts {r.experts_gb:.1f} - dense {r.dense_gb:.1f} - embedding"
            f" and head {r.head_gb:.1f} - workspace {r.activations_gb + r.overhead_gb:.1f} = {r.kv_gb:.1f} GB; /"
            f" {kv_bytes_per_token(q.geometry, q.rollout.kv_bytes):.0f} B per token = {r.kv_tokens:,} tokens"
        )
    lines += [
        f"  checkpoint: {' + '.join(f'{name} {size:.1f}' for name, size in plan.checkpoint.parts_gb)} GB",
        f"  step: {step.generation_s:.0f} + {step.update_weights_s:.0f} + {step.train_s:.0f} = {step.steady_s:.0f} s",
        f"  segment: setup {s.timing.setup_s:.0f} + first {s.timing.first_s:.0f} + {max(0, s.steps - 1)} x"
        f" {s.timing.steady_s:.0f} + {-(-s.steps // q.schedule.save_freq)} saves x {s.timing.save_s:.0f}"
        f" = {s.duration_s:.0f} s; limit {q.schedule.time_limit_s:.0f} - tail {s.timing.tail_s:.0f} s",
        f"  failures: {s.mtbf_h:.1f} h between; Young sqrt(2 x save x that) = {s.young_h:.2f} h, Daly {s.daly_h:.2f} h",
    ]
    return lines


def _constants(plan: Plan) -> list[str]:
    lines = [f"Constants ({plan.coefficients.origin}):"]
    for name, x in sorted(plan.coefficients.by_name.items()):
        lines.append(f"  {name} = {x.value:g} {x.unit} [{x.kind}] {x.source}")
    return lines
