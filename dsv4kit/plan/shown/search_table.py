"""A search's result for people: a line per plan; under it how to take it, what it brings, what would show it wrong."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4kit.plan.core import Plan
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.proposals import as_set, changes
from dsv4kit.plan.search import Candidate
from dsv4kit.plan.shown.table import table


def render_search(candidates: Sequence[Candidate], now: Plan | None, asked: Question) -> str:
    """The best plans, best first, below the one in use."""
    if not candidates:
        return "no legal layout for these nodes"
    header = ("", "verdict", "PP", "EP", "CP", "rollout", "GPU GiB", "host GB", "step s", "imbalance", "layout")
    rows = [_row("now", Candidate(now))] if now else []
    rows += [_row(f"{number}", x) for number, x in enumerate(candidates, 1)]
    legend = (
        "GPU GiB (in the update), host GB: the fullest; rollout: TP x DP; imbalance: fullest GPU over the average;"
        "\nstep s is extrapolated for everything that has not been run"
    )
    told = [f"{number}. {_told(x, asked)}" for number, x in enumerate(candidates, 1)]
    return "\n".join([table(header, rows), legend, "", *told])


def _row(name: str, x: Candidate) -> tuple[str, ...]:
    p, r, memory = x.question.parallel, x.question.rollout, x.plan.memory
    return (
        name,
        x.verdict,
        f"{p.pipeline}",
        f"{p.expert}",
        f"{p.context}",
        f"{r.tensor}x{r.data}" if r else "-",
        f"{memory.training_gib:.0f}",
        f"{memory.fullest_node.physical_gb:.0f}",
        f"{x.plan.step.steady_s:.0f}",
        f"{x.imbalance:.2f}",
        x.plan.layout,
    )


def _told(x: Candidate, asked: Question) -> str:
    changed = as_set(changes(asked, x.question))
    adopt = f'SET="{changed}"' if changed else "what is in use"
    stage, high = x.plan.memory.fullest_stage, x.plan.steady_interval_s[1]
    wrong = f"wrong if a step takes over {high:.0f} s or a GPU of stage {stage.share.stage}"
    wrong += f" over {stage.fullest.high_gib:.0f} GiB"
    return f"{adopt}\n   {gain(x)}; {wrong}"


def gain(x: Candidate) -> str:
    """What a step is shorter by, where that is more than the model's error."""
    if x.gain_s is None:
        return f"{x.plan.step.steady_s:.0f} s a step"
    if x.real:
        before = x.plan.step.steady_s + x.gain_s
        return f"gains {x.gain_s:.0f} s a step ({x.gain_s / before:.0%}), more than the model's error"
    return "no gain in time beyond the model's error"
