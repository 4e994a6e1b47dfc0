"""Reading the reward: what verl's mean score says, and when it may be read as a share of truncated answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dsv4kit.run import metrics
from dsv4kit.run.metrics import StepMetrics

_CLOSE = 1e-3


class Reading(NamedTuple):
    """`steps` for which `score mean = 1 - 2 x response_length/clip_ratio` may be asked, and `holds` of them that obey.

    `why_not`: for each reason, how many steps it keeps from being asked.
    """

    steps: int
    asked: int
    holds: int
    truncated: dict[int, float]
    why_not: dict[str, int]

    @property
    def text(self) -> str:
        """What a reader should take from it, in one sentence."""
        if not self.steps:
            return "No step has a score."
        if not self.asked:
            reasons = "; ".join(f"{reason} ({count} steps)" for reason, count in self.why_not.items())
            return f"The mean score is not a share of truncated answers in any step: {reasons}."
        if self.holds == self.asked:
            return (
                f"In {self.asked} of {self.steps} steps the score says no more than how many answers were cut off"
                " (mean = 1 - 2 x clip_ratio): every answer that ended scored +1. Accuracy is the validation's."
            )
        return (
            f"In {self.asked} of {self.steps} steps no answer was aborted and scores lie between -1 and +1; in"
            f" {self.holds} of them the mean is 1 - 2 x clip_ratio, in the others answers that ended were wrong too."
        )


def read(steps: Sequence[StepMetrics], max_response: int | None) -> Reading:
    """The reading of a merged curve; `max_response` is data.max_response_length in tokens, None where unknown.

    In the V1 trainer `response_length/clip_ratio` is the share of responses as long as the batch's longest, since verl
    pads to that (trainer_base.py, metric_utils.py of 0.9.1): it is a share of truncated ones only where the longest has
    reached the limit. `response_length`, not `prompt_length`.
    """
    asked = holds = scored = 0
    truncated: dict[int, float] = {}
    why_not: dict[str, int] = {}
    for step in steps:
        mean = step.data.get(metrics.REWARD)
        if metrics.REWARD not in step.data:
            continue
        scored += 1
        reason = _why_not(step, max_response)
        if reason:
            why_not[reason] = why_not.get(reason, 0) + 1
            continue
        clip = step.data[metrics.CLIP_RATIO]
        assert clip is not None
        assert mean is not None
        truncated[step.step] = clip
        asked += 1
        holds += abs(mean - (1 - 2 * clip)) < _CLOSE
    return Reading(scored, asked, holds, truncated, why_not)


def _why_not(step: StepMetrics, max_response: int | None) -> str | None:
    """What keeps a step's score from being read so; None where nothing does."""
    data = step.data
    low, high = (data.get(name) for name in metrics.SCORES)
    longest, clip, aborted = (
        data.get(name) for name in (metrics.RESPONSE_LENGTH_MAX, metrics.CLIP_RATIO, metrics.ABORTED_RATIO)
    )
    if data.get(metrics.REWARD) is None:
        return "the score is not a number"
    if clip is None or longest is None:
        return "verl logged no response lengths"
    if max_response is None:
        return "the longest allowed response is not known"
    if longest < max_response:
        return "no response reached the limit: clip_ratio then only counts those as long as the longest"
    if aborted is None:
        return "verl did not log whether responses were aborted"
    if aborted > 0:
        return "responses were aborted"
    if low is None or high is None or low < -1 - _CLOSE or high > 1 + _CLOSE:
        return "scores are not limited to +1 and -1"
    if clip == 0 and low >= 0:
        return "scores are not limited to +1 and -1"
    return None
