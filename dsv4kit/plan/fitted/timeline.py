"""When in an attempt the optimizer updates ran, so that samples of that phase can be told from those of the rollout.

verl's metrics say how long each part of a step took, not when. The marks of node 0 say when saves began and the attempt
ended; steps are laid out from there. A window is narrowed by what may be wrong with its place, so that what is left of
it lies within the update; nothing is left of one that cannot be placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from dsv4kit.run import metrics, phases
from dsv4kit.run.phases import Mark

# A mark is written when node 0 next looks at the log.
_MARK_ERROR_S = 1.0
# Between steps verl logs, validates and loads data, which no part of a step counts.
_DRIFT = 0.05


class Window(NamedTuple):
    """Seconds since the epoch."""

    begin: float
    end: float

    def holds(self, time: float) -> bool:
        """Whether the moment lies in it."""
        return self.begin <= time <= self.end


def update_windows(
    marks: Sequence[Mark], steps: Sequence[Mapping[str, float]], has_rollout: bool
) -> tuple[Window, ...]:
    """Where in the attempt the updates of its trained steps lie.

    `steps` are seconds by verl's name. Without a rollout all of the training is update but the saves.
    """
    if not has_rollout:
        return tuple(
            Window(one.time + _MARK_ERROR_S, other.time - _MARK_ERROR_S)
            for one, other in pairwise(marks)
            if one.phase == phases.STEPS and other.time - one.time > 2 * _MARK_ERROR_S
        )
    anchors = _anchors(marks, steps)
    found = [_window(index, steps, anchors) for index in range(len(steps))]
    return tuple(window for window in found if window and window.end > window.begin)


def _anchors(marks: Sequence[Mark], steps: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """Step, by its place, whose update ended at a known moment: a save begins then."""
    saves = [mark.time for mark in marks if mark.phase == phases.SAVE]
    saving = [index for index, step in enumerate(steps) if metrics.SAVE_TIME in step]
    # A save that no mark tells of, or a mark of a step whose metrics are lost: which is which cannot be told.
    return dict(zip(saving, saves, strict=True)) if len(saves) == len(saving) else {}


def _window(index: int, steps: Sequence[Mapping[str, float]], anchors: Mapping[int, float]) -> Window | None:
    took = steps[index].get(metrics.UPDATE_TIME)
    if took is None or not anchors:
        return None
    anchor = min(anchors, key=lambda other: abs(other - index))
    if anchor >= index:
        distance = sum(_between(steps[i], steps[i + 1]) for i in range(index, anchor))
        end = anchors[anchor] - distance
    else:
        distance = sum(_between(steps[i], steps[i + 1]) for i in range(anchor, index))
        end = anchors[anchor] + distance
    error = _MARK_ERROR_S + _DRIFT * distance
    return Window(end - took + error, end - error)


def _between(one: Mapping[str, float], following: Mapping[str, float]) -> float:
    """Seconds from the end of one step's update to the end of the next one's."""
    after = sum(one.get(name, 0.0) for name in (metrics.SAVE_TIME, metrics.WEIGHT_SYNC_TIME, metrics.TEST_TIME))
    later = sum(following.get(name, 0.0) for name in (metrics.SAVE_TIME, metrics.WEIGHT_SYNC_TIME))
    return after + following[metrics.STEP_TIME] - later
