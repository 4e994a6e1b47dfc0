"""The plan for programs: plain values, units in the keys."""

from __future__ import annotations

import math
from typing import Any

from dsv4kit.plan.core import Plan
from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.checkpoint_size import checkpoints_on_disk
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.counted.segments import SegmentPlan
from dsv4kit.plan.counted.topology import slurm_segment
from dsv4kit.plan.fitted.calibrated import point_of
from dsv4kit.plan.levers import Lever
from dsv4kit.plan.proposals import changes
from dsv4kit.plan.search import Candidate


def as_json(plan: Plan, levers: tuple[Lever, ...] = ()) -> dict[str, Any]:
    """Everything `dsv4kit plan` shows."""
    q, memory = plan.question, plan.memory
    totals = geo.totals(q.geometry)
    return {
        "verdict": plan.verdict.verdict,
        "reasons": list(plan.verdict.reasons),
        "warnings": list(plan.verdict.warnings),
        "not_considered": list(q.not_considered),
        "cost": {
            "days": _finite(plan.segment.days),
            "gpu_hours": _finite(plan.segment.node_hours * q.parallel.gpus_per_node),
            "node_hours": _finite(plan.segment.node_hours),
        },
        "question": point_of(q)._asdict() | {"gpus_per_node": q.parallel.gpus_per_node, "mtp": q.mtp},
        "coefficients": plan.coefficients.origin,
        "extrapolated": list(plan.memory_extrapolated),
        "model": {
            "parameters": totals.with_mtp if q.mtp else totals.main,
            "active_parameters": totals.active,
            "released_gb": _r(totals.released_with_mtp_bytes / 1e9),
        },
        "gpu": {
            "stages": [
                {
                    "stage": stage.share.stage,
                    "layers": len(stage.share.layers),
                    "embedding": stage.share.embedding,
                    "head": stage.share.head,
                    "mtp": stage.share.mtp,
                    "weights_gib": _r(stage.weights_gib),
                    "gradients_gib": _r(stage.gradients_gib),
                    "optimizer_gib": _r(stage.optimizer_gib),
                    "cast_gib": _r(stage.cast_gib),
                    "activations_gib": _r(stage.activations_gib),
                    "static_gib": _r(stage.static_gib),
                    "peak_gib": _r(stage.peak_gib),
                    "need_gib": _r(stage.need_gib),
                    "limit_gib": _r(stage.limit_gib),
                    "phases_gib": {
                        phase.name: {
                            "need": _r(phase.need_gib),
                            "low": _r(phase.low_gib),
                            "high": _r(phase.high_gib),
                        }
                        for phase in stage.phases
                    },
                }
                for stage in memory.stages
            ]
        },
        "host": {
            "nodes": [
                {
                    "nodes": node.nodes,
                    "role": node.role,
                    "first_node": node.first,
                    "head": node.head,
                    "stages": list(node.stages),
                    "optimizer_gb": _r(node.optimizer_gb),
                    "parked_gb": _r(node.parked_gb),
                    "pinned_gradients_gb": _r(node.pinned_gradients_gb),
                    "pinned_master_gb": _r(node.pinned_master_gb),
                    "pinned_weights_gb": _r(node.pinned_weights_gb),
                    "rollout_gb": _r(node.rollout_gb),
                    "base_gb": _r(node.base_gb),
                    "head_extra_gb": _r(node.head_extra_gb),
                    "object_store_gb": _r(node.object_store_gb),
                    "pageable_gb": _r(node.pageable_gb),
                    "pinned_gb": _r(node.pinned_gb),
                    "physical_gb": _r(node.physical_gb),
                    "reported_gb": _r(node.reported_gb),
                    "limit_gb": _r(node.limit_gb),
                    "low_gb": _r(node.physical_gb - node.spread_gb[0]),
                    "high_gb": _r(node.physical_gb + node.spread_gb[1]),
                    "phases_gb": {name: _r(size) for name, size in node.phases},
                }
                for node in memory.nodes
            ]
        },
        "checkpoint": {
            "contents": list(plan.checkpoint.contents),
            "parts_gb": {name: _r(size) for name, size in plan.checkpoint.parts_gb},
            "size_gb": _r(plan.checkpoint.size_gb),
            "on_disk": checkpoints_on_disk(q.schedule),
            "on_disk_gb": _r(checkpoints_on_disk(q.schedule) * plan.checkpoint.size_gb),
            "lossless": plan.checkpoint.lossless,
            "note": plan.checkpoint.note,
        },
        "slurm": {"segment": slurm_segment(q)},
        "rollout": _rollout(plan),
        "step": {
            "generation_s": _r(plan.step.generation_s),
            "update_weights_s": _r(plan.step.update_weights_s),
            "train_s": _r(plan.step.train_s),
            "log_probs_s": _r(plan.step.log_probs_s),
            "update_s": _r(plan.step.update_s),
            "optimizer_s": _r(plan.step.optimizer_s),
            "validation_s": _r(plan.step.validation_s),
            "steady_s": _r(plan.step.steady_s),
            "steady_low_s": _r(plan.steady_interval_s[0]),
            "steady_high_s": _r(plan.steady_interval_s[1]),
            "tokens_per_gpu_s": _r(plan.step.tokens_per_gpu_s),
            "mfu": _r(plan.step.mfu, 4),
            "first_s": _r(plan.step.first_s),
            "first_warm_s": _r(plan.step.first_warm_s),
            "extrapolated": list(plan.step_extrapolated),
        },
        "segment": _segment(plan.segment) | {"warm": _segment(plan.segment_warm)},
        "levers": [lever._asdict() for lever in levers],
    }


def _rollout(plan: Plan) -> dict[str, Any] | None:
    rollout, asked = plan.memory.rollout, plan.question.rollout
    if rollout is None or asked is None:
        return None
    return {
        "tensor_parallel_size": asked.tensor,
        "data_parallel_size": asked.data,
        "expert_parallel_size": asked.expert,
        "replicas": rollout.replicas,
        "weights_gb": _r(rollout.weights_gb),
        "budget_gb": _r(rollout.budget_gb),
        "workspace_gb": _r(rollout.activations_gb + rollout.overhead_gb),
        "kv_gb": _r(rollout.kv_gb),
        "kv_bytes_per_token": _r(rollout.kv_bytes_per_token),
        "kv_tokens": rollout.kv_tokens,
        "fits": rollout.fits,
    }


def _segment(segment: SegmentPlan) -> dict[str, Any]:
    return {
        "steps": segment.steps,
        "fitting_steps": segment.fitting_steps,
        "count": segment.segments,
        "duration_s": _r(segment.duration_s),
        "save_s": _r(segment.timing.save_s),
        "useful": _r(segment.useful, 4),
        "goodput": _r(segment.goodput, 4),
        "node_hours": _finite(segment.node_hours) if segment.steps else None,
        "mtbf_h": _r(segment.mtbf_h),
        "young_h": _r(segment.young_h),
        "daly_h": _r(segment.daly_h),
        "save_steps": segment.save_steps,
    }


def candidates_json(candidates: tuple[Candidate, ...], asked: Question) -> list[dict[str, Any]]:
    """The search's result; `set` is what has to be set to get from what was asked to it."""
    return [
        {
            "verdict": x.verdict,
            "pipeline_parallel_size": x.question.parallel.pipeline,
            "expert_parallel_size": x.question.parallel.expert,
            "context_parallel_size": x.question.parallel.context,
            "layout": x.plan.layout,
            "set": changes(asked, x.question),
            "rollout": x.question.rollout and {"tensor": x.question.rollout.tensor, "data": x.question.rollout.data},
            "gpu_need_gib": _r(x.plan.memory.fullest_stage.need_gib),
            "host_physical_gb": _r(x.plan.memory.fullest_node.physical_gb),
            "steady_s": _r(x.plan.step.steady_s),
            "gain_s": None if x.gain_s is None else _r(x.gain_s),
            "beyond_error": x.real,
            "imbalance": _r(x.imbalance, 3),
        }
        for x in candidates
    ]


def _finite(value: float) -> float | None:
    return _r(value) if math.isfinite(value) else None


def _r(value: float, digits: int = 2) -> float:
    return round(value, digits)
