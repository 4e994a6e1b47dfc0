"""Where the planner's fitted constants hold: the runs they were fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dsv4kit.errors import UserError
from dsv4kit.plan.counted.inputs import Levers, Question
from dsv4kit.plan.counted.layout import parse
from dsv4kit.plan.counted.shards import layout_of


class Point(NamedTuple):
    """One measured run."""

    hardware: str
    model: str
    recipe: str
    nodes: int
    pipeline: int
    expert: int
    context: int
    sequences: int
    prompt_tokens: int
    response_tokens: int
    layout: str
    optimizer: str
    rollout: str


# Layouts and optimizer settings are not published: these are the ones that reproduce the published memory.
PUBLISHED = (
    Point(
        *("h100", "dsv4-pro", "grpo", 64, 32, 8, 1, 64, 2048, 4096),
        layout="Et*3|(tt|)*27(t|)*3tL",
        optimizer="CPU 1, precision-aware, bf16 gradients",
        rollout="TP 8 x DP 8",
    ),
    Point(
        *("gb200", "dsv4-pro", "grpo", 64, 16, 16, 1, 64, 2048, 8192),
        layout="Et*4|(t*4|)*12(t*3|)*2t*3L",
        optimizer="CPU 1, bf16 gradients",
        rollout="TP 1 x DP 32",
    ),
)

# A step time alone: Megatron-Bridge's card of Flash SFT.
CARD = Point(
    *("gb200", "dsv4-flash", "sft", 16, 4, 8, 2, 128, 512, 512),
    layout="Et*11|t*11|t*11|t*10mL",
    optimizer="CPU 0",
    rollout="none",
)

MEMORY = ("hardware", "model", "recipe")
# What memory goes by smoothly: between two measured values it is not extrapolated.
MEMORY_RANGES = ("nodes", "expert", "context", "response_tokens")
_WORDS = {"pipeline": "PP", "expert": "EP", "context": "CP"}
TIME = (
    *MEMORY,
    *("nodes", "pipeline", "expert", "context", "sequences", "prompt_tokens", "response_tokens"),
    *("layout", "optimizer", "rollout"),
)


def point_of(q: Question) -> Point:
    """The question as a point."""
    return Point(
        hardware=q.hardware.name,
        model=q.model,
        recipe=q.recipe,
        nodes=q.parallel.nodes,
        pipeline=q.parallel.pipeline,
        expert=q.parallel.expert,
        context=q.parallel.context,
        sequences=q.work.sequences,
        prompt_tokens=q.work.prompt_tokens,
        response_tokens=q.work.response_tokens,
        layout=layout_of(q),
        optimizer=_optimizer(q.levers),
        rollout=f"TP {q.rollout.tensor} x DP {q.rollout.data}" if q.rollout else "none",
    )


def _optimizer(levers: Levers) -> str:
    words = [f"CPU {levers.on_cpu:g}"]
    words += ["precision-aware"] * levers.precision_aware + ["bf16 gradients"] * levers.bf16_gradients
    return ", ".join(words)


def extrapolated(q: Question, points: Sequence[Point], names: Sequence[str], kin: str) -> tuple[str, ...]:
    """In what the question differs from the nearest measured run; nothing where it is that run.

    Nearest is one of the same recipe, then on the hardware whose constants are used (`kin`), then the most alike.
    """
    own = point_of(q)

    def distance(point: Point) -> tuple[object, ...]:
        return point.recipe != own.recipe, point.hardware != kin, len(_differences(own, point, names))

    nearest = min(points, key=distance, default=None)
    return _differences(own, nearest, names) if nearest else ("nothing measured",)


def _differences(own: Point, point: Point, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        f"{_WORDS.get(name, name.replace('_', ' '))} {getattr(own, name)} (measured: {getattr(point, name)})"
        for name in names
        if _comparable(own, name) != _comparable(point, name)
    )


def _comparable(point: Point, name: str) -> object:
    """The value; of a layout its stages, which can be written in several ways."""
    value = getattr(point, name)
    try:
        return parse(value) if name == "layout" else value
    except UserError:
        return value


def beyond(q: Question, points: Sequence[Point]) -> tuple[str, ...]:
    """Lengths and splits that lie outside everything that memory was measured with."""
    own = point_of(q)
    found = []
    for name in MEMORY_RANGES:
        value, measured = getattr(own, name), [getattr(point, name) for point in points]
        if measured and not min(measured) <= value <= max(measured):
            span = f"{min(measured)} to {max(measured)}" if min(measured) < max(measured) else f"{min(measured)}"
            found.append(f"{_WORDS.get(name, name.replace('_', ' '))} {value} (measured: {span})")
    return tuple(found)
