"""Several hardwares and node counts side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dsv4kit.plan.core import Plan
from dsv4kit.plan.shown.table import table


class Compared(NamedTuple):
    """One of them as it was asked for, its plan (None where there is none), and why the profile's own cannot be."""

    name: str
    plan: Plan | None
    refused: str = ""
    other_split: bool = False


def render(rows: Sequence[Compared]) -> str:
    """A line each."""
    header = ("", "verdict", "fullest GPU, GiB", "fullest node, GB", "s/step", "days", "GPU-hours")
    lines, notes = [], []
    for row in rows:
        mark = "*" if row.other_split else ""
        if row.refused:
            notes.append(f"{row.name}: {'* another split than the profile has: ' if mark else ''}{row.refused}")
        if row.plan is None:
            lines.append((row.name, "no", *["-"] * 5))
            continue
        stage, node, run = row.plan.memory.fullest_stage, row.plan.memory.fullest_node, row.plan.segment
        gpu_hours = run.node_hours * row.plan.question.parallel.gpus_per_node
        lines.append(
            (
                f"{row.name}{mark}",
                row.plan.verdict.verdict,
                f"{stage.need_gib:.0f} of {stage.limit_gib:.0f}",
                f"{node.physical_gb:.0f} of {node.limit_gb:.0f}",
                f"{row.plan.step.steady_s:.0f}",
                f"{run.days:.1f}" if math.isfinite(run.days) else "-",
                f"{gpu_hours:,.0f}" if math.isfinite(gpu_hours) else "-",
            )
        )
    asked = dict.fromkeys(f"{row.plan.question.model} {row.plan.question.recipe}" for row in rows if row.plan)
    return "\n".join(
        [*(["all of them: " + next(iter(asked))] if len(asked) == 1 else []), table(header, lines), *notes]
    )


def as_rows(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [_as_row(row) for row in rows]


def _as_row(row: Compared) -> dict[str, Any]:
    if row.plan is None:
        return {"name": row.name, "verdict": "no", "refused": row.refused}
    stage, node, run = row.plan.memory.fullest_stage, row.plan.memory.fullest_node, row.plan.segment
    finite = math.isfinite(run.node_hours)
    return {
        "name": row.name,
        "verdict": row.plan.verdict.verdict,
        "refused": row.refused or None,
        "gpu_need_gib": round(stage.need_gib, 2),
        "host_physical_gb": round(node.physical_gb, 2),
        "steady_s": round(row.plan.step.steady_s, 2),
        "days": round(run.days, 2) if finite else None,
        "gpu_hours": round(run.node_hours * row.plan.question.parallel.gpus_per_node, 1) if finite else None,
    }
