"""What the planner would have otherwise, each with the make variables (or options) that take it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dsv4kit.plan.core import Plan
    from dsv4kit.plan.levers import Lever

# Within a quarter of the best interval the loss is flat.
_FAR = 0.25


class Recommended(NamedTuple):
    """One change in words, and what has to be set; of `SET` the words."""

    what: str
    variables: Mapping[str, object]


def recommended(plan: Plan, levers: Sequence[Lever] = ()) -> tuple[Recommended, ...]:
    """The most telling first."""
    return tuple(_recommended(plan, levers))


def _recommended(plan: Plan, levers: Sequence[Lever]) -> Iterator[Recommended]:
    segment, schedule = plan.segment, plan.question.schedule
    if not plan.verdict.fits:
        if found := next((lever for lever in levers if lever.verdict == "fit"), None):
            yield Recommended(f"{found.change}: memory then fits", {"SET": tuple(found.setting.split())})
        return
    if abs(segment.save_steps - schedule.save_freq) > _FAR * schedule.save_freq and segment.steps:
        yield Recommended(
            f"save every {segment.save_steps} steps, now {schedule.save_freq}: loses least to saves and failures",
            {"SAVE_FREQ": segment.save_steps},
        )
    if 0 < segment.fitting_steps < min(schedule.segment_steps, schedule.steps):
        yield Recommended(
            f"segments of {segment.fitting_steps} steps, now {schedule.segment_steps}: more do not fit the time limit",
            {"SEGMENT_STEPS": segment.fitting_steps},
        )
    if "optimizer" not in plan.checkpoint.contents and schedule.steps > segment.steps:
        yield Recommended(
            "checkpoints that lose nothing at the end of a segment, if the file system has room for them",
            {"SET": ("checkpoint.contents=[model,optimizer,extra]",)},
        )
