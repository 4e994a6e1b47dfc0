"""Where the time of an attempt went: what of it trained, what was start, save and end, and what has to be done again.

Standard library only; frozen into every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from dsv4kit.run import ends, metrics, phases
from dsv4kit.run.metrics import StepMetrics
from dsv4kit.run.outcome import Outcome
from dsv4kit.run.phases import Mark

START = "start"
FIRST_STEP = "first step beyond a usual one"
STEPS = "steps"
SAVE = "save"
END = "end"
LOST = "lost"

# Ends after which nothing that was trained is missing from the checkpoints.
_WELL = frozenset({ends.COMPLETED, ends.STOPPED, ends.NOTHING_TO_DO})


def spent(marks: Sequence[Mark], steps: Iterable[StepMetrics], outcome: Outcome | None, now: float) -> dict[str, float]:
    """Seconds of one attempt by what they went into; no key for what took none.

    `LOST` is training since the last whole save of an attempt that ended otherwise than well, and all of the training
    of one that saved nothing. `now` (seconds since the epoch) ends an attempt that is still going on.
    """
    until = outcome.ended if outcome else now
    found: dict[str, float] = {}
    since_save = 0.0
    lasted = list(phases.spans(marks, until))
    names = [phase for phase, _, _ in lasted]
    for index, (phase, since, to) in enumerate(lasted):
        seconds = max(0.0, to - since)
        if phase == phases.STEPS:
            since_save += seconds
            found[STEPS] = found.get(STEPS, 0.0) + seconds
        elif phase == phases.SAVE:
            found[SAVE] = found.get(SAVE, 0.0) + seconds
            # The trainer went on after it: the save is whole.
            since_save = since_save + seconds if names[index + 1 : index + 2] != [phases.STEPS] else 0.0
        else:
            kind = END if phase in (phases.END, phases.CONTAINER_REMOVAL) else START
            found[kind] = found.get(kind, 0.0) + seconds
    if outcome and outcome.end not in _WELL:
        trained = found.get(STEPS, 0.0)
        lost = min(trained, since_save if outcome.advanced else trained)
        found[LOST], found[STEPS] = lost, trained - lost
    extra = min(first_step_extra(steps), found.get(STEPS, 0.0))
    found[FIRST_STEP], found[STEPS] = extra, found.get(STEPS, 0.0) - extra
    return {kind: seconds for kind, seconds in found.items() if seconds > 0}


def first_step_extra(steps: Iterable[StepMetrics]) -> float:
    """Seconds that the attempt's first step took longer than its usual one: compilation, mostly. 0 where unknown."""
    took = [seconds for step in steps if step.trained and (seconds := step.data.get(metrics.STEP_TIME)) is not None]
    return max(0.0, took[0] - median(took[1:])) if len(took) > 2 else 0.0


def node_hours(seconds: Mapping[str, float], nodes: int) -> float:
    """What the nodes were held for."""
    return sum(seconds.values()) * nodes / 3600
