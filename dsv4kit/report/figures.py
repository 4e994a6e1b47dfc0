"""The figures of a report, as plotly's own JSON: data and layout, drawn by plotly.js in the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from dsv4kit.report.gather import PARTS, RunFacts
from dsv4kit.report.memory import NodeMemorySeen
from dsv4kit.run import cost, metrics

# Okabe and Ito's colours, which colour-blind people can tell apart, on a dark ground and on a light one.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1", "#999999", "#666666")
_BUCKETS = 240
_MOST_POINTS = 4000


class Figure(NamedTuple):
    """A figure with its heading, what it shows in words, and plotly's JSON; `missing` says why there is none."""

    key: str
    title: str
    text: str
    spec: dict[str, Any] | None
    missing: str = ""


def figures(facts: RunFacts) -> list[Figure]:
    """All of them, in the order of the page."""
    return [
        _learning(facts),
        _validation(facts),
        _rates(facts),
        _step_time(facts),
        _first_steps(facts),
        _waterfall(facts),
        _memory(facts, "host"),
        _memory(facts, "gpu"),
        _agreement(facts),
        _lengths(facts),
    ]


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _line(facts: RunFacts, name: str, shown: str, colour: int = 0, **more: Any) -> dict[str, Any] | None:
    """The curve of a metric; None where no step has it."""
    steps, values = facts.curve(name)
    if not any(value is not None for value in values):
        return None
    every = max(1, math.ceil(len(steps) / _MOST_POINTS))
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(steps) < 3 else "lines",
        "name": _text(shown),
        "x": steps[::every],
        "y": [_round(value) for value in values[::every]],
        "line": {"color": _COLOURS[colour % len(_COLOURS)], "width": 1.6},
        **more,
    }


def _text(text: str) -> str:
    """plotly reads a little HTML in its texts; there is none in ours."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}, **more}


def _borders(facts: RunFacts) -> list[dict[str, Any]]:
    """A line where each attempt began, red where the one before ended badly."""
    shapes = []
    for before, after in pairwise(facts.attempts):
        if after["start"] is None:
            continue
        colour = "#D55E00" if before["fault"] else "#999999"
        shapes.append(
            {
                "type": "line",
                "x0": after["start"] + 0.5,
                "x1": after["start"] + 0.5,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"color": colour, "width": 1.5 if before["fault"] else 0.7, "dash": "dot"},
            }
        )
    return shapes


def _curves(facts: RunFacts, key: str, title: str, text: str, lines: Sequence[Any], y: str, missing: str) -> Figure:
    found = [line for line in lines if line]
    if not found:
        return Figure(key, title, text, None, missing)
    return Figure(key, title, text, {"data": found, "layout": _layout("step", y, shapes=_borders(facts))})


def _learning(facts: RunFacts) -> Figure:
    lines = [
        _line(facts, metrics.REWARD, "reward, mean"),
        _line(facts, metrics.SFT_LOSS, "loss", 0),
        _line(facts, "val/loss", "validation loss", 1),
    ]
    text = "Dotted lines: a segment or attempt begins; red where the one before ended by a fault."
    return _curves(facts, "learning", "Reward or loss", text, lines, "", "no reward and no loss in this run's metrics")


def _validation(facts: RunFacts) -> Figure:
    names = sorted({name for step in facts.steps for name in metrics.of_validation(step)})
    lines = [
        _line(facts, name, name, n, mode="lines+markers") for n, name in enumerate(names[:8]) if name != "val/loss"
    ]
    text = "Accuracy and other results of verl's validation: what the model can do, apart from the training reward."
    return _curves(facts, "validation", "Validation", text, lines, "", "this run was not validated yet")


def _rates(facts: RunFacts) -> Figure:
    lines = [_line(facts, name, "learning rate") for name in metrics.LEARNING_RATES]
    lines += [_line(facts, name, "gradient norm", 1, yaxis="y2") for name in ("actor/grad_norm", "train/grad_norm")]
    figure = _curves(
        facts, "rates", "Learning rate and gradient", "", lines, "learning rate", "neither is in this run's metrics"
    )
    if figure.spec:
        figure.spec["layout"]["yaxis"]["rangemode"] = "tozero"  # a constant rate has a scale too
        figure.spec["layout"]["yaxis2"] = {
            "overlaying": "y",
            "side": "right",
            "title": {"text": "norm"},
            "showgrid": False,
        }
    return figure


def _step_time(facts: RunFacts) -> Figure:
    lines = []
    for number, part in enumerate(PARTS):
        line = _line(facts, f"timing_s/{part}", part, number, stackgroup="parts")
        if line:
            line["line"]["width"] = 0.5
            lines.append(line)
    whole = _line(facts, metrics.STEP_TIME, "whole step", 8)
    text = "Seconds of each step by part, as verl times them; validation is not in it."
    return _curves(facts, "step-time", "Step time", text, [*lines, whole], "s", "no step times in this run's metrics")


def _first_steps(facts: RunFacts) -> Figure:
    title, text = (
        "First steps",
        "The first step of each start compiles kernels; beside it the usual step of that start.",
    )
    if not facts.first_steps:
        return Figure("first-steps", title, text, None, "no start has made three steps yet")
    names = [one["start"] for one in facts.first_steps]
    bars = [
        {
            "type": "bar",
            "name": shown,
            "x": names,
            "y": [_round(one[key]) for one in facts.first_steps],
            "marker": {"color": _COLOURS[number]},
        }
        for number, (key, shown) in enumerate((("first_s", "first step"), ("usual_s", "usual step")))
    ]
    layout = _layout("segment.attempt", "s", barmode="group")
    layout["xaxis"]["type"] = "category"
    return Figure("first-steps", title, text, {"data": bars, "layout": layout})


def _waterfall(facts: RunFacts) -> Figure:
    title, text = "Where the node-hours went", "From all that was held down to what trained and is kept; queues apart."
    held = sum(facts.hours.values())
    if not held:
        return Figure("node-hours", title, text, None, "no attempt has begun yet")
    parts = [(kind, facts.hours.get(kind, 0.0)) for kind in (cost.START, cost.FIRST_STEP, cost.SAVE, cost.END)]
    parts += [(f"lost: {end}", hours) for end, hours in facts.lost_to.items()]
    parts = [(kind, hours) for kind, hours in parts if hours > 0]
    bar = {
        "type": "waterfall",
        "x": ["held", *(_text(kind) for kind, _ in parts), "trained and kept"],
        "y": [_round(held), *(_round(-hours) for _, hours in parts), None],
        "measure": ["absolute", *["relative"] * len(parts), "total"],
        "totals": {"marker": {"color": "#0072B2"}},
        "decreasing": {"marker": {"color": "#D55E00"}},
        "increasing": {"marker": {"color": "#0072B2"}},
        "connector": {"line": {"color": "#999999", "width": 0.5}},
    }
    return Figure("node-hours", title, text, {"data": [bar], "layout": _layout("", "node-hours")})


def _memory(facts: RunFacts, kind: str) -> Figure:
    title = "Host memory per node" if kind == "host" else "GPU memory per node, fullest GPU"
    text = (
        "From the kit's own sampler, GiB. verl's own figures come from the last pipeline stage only; stage 0 is marked."
        if facts.memory.nodes and any(node.stage_0 for node in facts.memory.nodes)
        else "From the kit's own sampler, GiB."
    )
    if facts.memory.thinned:
        text += " A part of the samples was read: a short peak may be missing."
    nodes = [node for node in facts.memory.nodes if kind == "host" or node.gpu_peak is not None]
    if not nodes:
        return Figure(
            f"memory-{kind}", title, text, None, "no samples of it: none were taken, or the nodes have no GPU"
        )
    begin = min(node.times[0] for node in nodes)
    until = max(node.times[-1] for node in nodes)
    width = max((until - begin) / _BUCKETS, 1.0)
    buckets = int((until - begin) / width) + 1
    rows = [_bucketed(node, kind, begin, width, buckets) for node in nodes]
    heat = {
        "type": "heatmap",
        "x": [round((number + 0.5) * width / 3600, 3) for number in range(buckets)],
        "y": [_text(f"{node.node}{' · stage 0' if node.stage_0 else ''}") for node in nodes],
        "z": rows,
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": "GiB"}, "thickness": 12},
        "hovertemplate": "%{y}, %{x} h: %{z} GiB<extra></extra>",
    }
    layout = _layout("hours since the first sample", "", height=max(260, min(900, 90 + 14 * len(nodes))))
    layout["yaxis"] |= {"type": "category", "automargin": True}
    return Figure(f"memory-{kind}", title, text, {"data": [heat], "layout": layout})


def _bucketed(node: NodeMemorySeen, kind: str, begin: float, width: float, buckets: int) -> list[float | None]:
    """The highest value of each bucket; None where there was no sample (between segments)."""
    row: list[float | None] = [None] * buckets
    for at, value in zip(node.times, node.host if kind == "host" else node.gpu, strict=True):
        place = int((at - begin) / width)
        before = row[place]
        if value is not None and (before is None or value > before):
            row[place] = round(value, 1)
    return row


def _agreement(facts: RunFacts) -> Figure:
    lines = [
        _line(facts, metrics.PEARSON, "Pearson"),
        _line(facts, "training/rollout_probs_diff_mean", "mean difference", 1, yaxis="y2"),
        _line(facts, "training/rollout_probs_diff_max", "largest difference", 5, yaxis="y2"),
    ]
    text = "Probabilities of the sampled tokens in the rollout and in the actor. Well below 1: the weights differ."
    figure = _curves(
        facts,
        "agreement",
        "Rollout and actor",
        text,
        lines,
        "Pearson",
        "verl logged none (rollout.calculate_log_probs)",
    )
    if figure.spec:
        figure.spec["layout"]["yaxis2"] = {"overlaying": "y", "side": "right", "showgrid": False}
    return figure


def _lengths(facts: RunFacts) -> Figure:
    lines = [
        _line(facts, metrics.RESPONSE_LENGTH, "mean"),
        _line(facts, metrics.RESPONSE_LENGTH_MAX, "longest", 1),
    ]
    if facts.reward.truncated:
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "truncated",
                "x": list(facts.reward.truncated),
                "y": [_round(value) for value in facts.reward.truncated.values()],
                "yaxis": "y2",
                "line": {"color": _COLOURS[5], "width": 1},
            }
        )
    text = "The share of truncated answers is drawn only for steps in which an answer reached the limit."
    figure = _curves(
        facts, "lengths", "Response lengths", text, lines, "tokens", "no response lengths in this run's metrics"
    )
    if figure.spec:
        figure.spec["layout"]["yaxis2"] = {
            "overlaying": "y",
            "side": "right",
            "range": [0, 1],
            "showgrid": False,
            "title": {"text": "share"},
        }
    return figure


def comparison(one: RunFacts, other: RunFacts) -> list[Figure]:
    """Curves of two runs in one figure each."""
    found = []
    for key, title, name, y in (
        ("learning", "Reward", metrics.REWARD, ""),
        ("loss", "Loss", metrics.SFT_LOSS, ""),
        ("step-time", "Step time", metrics.STEP_TIME, "s"),
        ("lengths", "Response length, mean", metrics.RESPONSE_LENGTH, "tokens"),
        ("agreement", "Rollout and actor, Pearson", metrics.PEARSON, ""),
    ):
        lines = [_line(facts, name, facts.run, number) for number, facts in enumerate((one, other))]
        if shown := [line for line in lines if line]:
            found.append(Figure(key, title, "", {"data": shown, "layout": _layout("step", y)}))
    return found


def hours_shown(hours: Mapping[str, float]) -> list[tuple[str, float]]:
    """Node-hours by kind, what is lost last."""
    order = (cost.STEPS, cost.START, cost.FIRST_STEP, cost.SAVE, cost.END, cost.LOST)
    return [(kind, hours[kind]) for kind in order if kind in hours]
