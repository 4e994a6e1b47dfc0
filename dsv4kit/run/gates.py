"""Gates: what the metrics of a run must not become, and what is done about it.

Each looks at the last steps that were trained, the newest last, and acts once so many of them in a row are bad; the
first bad one is told. Limits and actions are data (`watch.gates` of a profile), frozen into the run.

Standard library only; used on the compute nodes and by `status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

from dsv4kit.run import metrics
from dsv4kit.run.metrics import StepMetrics

WARN = "warn"
STOP = "stop"  # at the next step boundary, with a checkpoint; the chain does not go on
STOP_NOW = "stop_now"  # without one: what would be saved is worth nothing

# The mode of all together: as each says, at most a warning (WARN), none.
ACT, OFF = "act", "off"

PROVED = "proved"

NOT_A_NUMBER, AGREEMENT, REWARD, LENGTH = "not_a_number", "agreement", "reward", "length"


@dataclass(frozen=True)
class GateFinding:
    """A step that a gate does not let pass; `action` is what is due now, `line` says what was seen."""

    gate: str
    action: str
    step: int
    line: str


def check(gates: Mapping[str, Any], steps: Sequence[StepMetrics]) -> list[GateFinding]:
    """What the newest of `steps` shows. Pure. `steps`: trained ones, ascending, as many as `look_back` says or more.

    `gates` is `watch.gates` as a mapping; empty, as in runs of older kits, it asks for nothing.
    """
    mode = gates.get("mode", OFF)
    if mode == OFF or not steps:
        return []
    found = []
    for name, bad in _BAD.items():
        if not (gate := gates.get(name)):
            continue
        row = int(gate["in_a_row"])
        # It ends so far back that no bad row can be in it.
        before = steps[:-row][-int(gate.get("window", 0)) :]
        if not (said := bad(gate, steps[-1], before)):
            continue
        due = len(steps) >= row and all(bad(gate, step, before) for step in steps[-row:])
        action = gate["action"] if due and mode == ACT else WARN
        often = f", {row} steps in a row" if due and row > 1 else ""
        found.append(GateFinding(name, action, steps[-1].step, f"{said} in step {steps[-1].step}{often}"))
    return found


def look_back(gates: Mapping[str, Any]) -> int:
    """How many steps `check` needs to see."""
    each = [gate for name in _BAD if (gate := gates.get(name))]
    return max((int(gate["in_a_row"]) + int(gate.get("window", 0)) for gate in each), default=1)


def _not_a_number(gate: Mapping[str, Any], step: StepMetrics, before: Sequence[StepMetrics]) -> str:
    names = step.not_numbers
    return f"{', '.join(names)} not a number (NaN or infinite)" if names else ""


def _agreement(gate: Mapping[str, Any], step: StepMetrics, before: Sequence[StepMetrics]) -> str:
    if metrics.PEARSON not in step.data:
        return ""
    value, least = step.number(metrics.PEARSON), gate["least"]
    if value is None:
        return "the agreement of rollout and actor is not a number"
    return f"rollout and actor agree to {value:.4f} (Pearson), below {least:g}," if value < least else ""


def _reward(gate: Mapping[str, Any], step: StepMetrics, before: Sequence[StepMetrics]) -> str:
    value, window = step.number(metrics.REWARD), _window(metrics.REWARD, gate, before)
    if value is None or not window:
        return ""
    usual = fmean(window)
    drop = max(gate["deviations"] * pstdev(window), gate["least_drop"])
    return f"the reward is {value:.3f}, and was {usual:.3f} before," if usual - value > drop else ""


def _length(gate: Mapping[str, Any], step: StepMetrics, before: Sequence[StepMetrics]) -> str:
    value, window = step.number(metrics.RESPONSE_LENGTH), _window(metrics.RESPONSE_LENGTH, gate, before)
    if value is None or not window:
        return ""
    usual = median(window)
    return f"responses have {value:.0f} tokens, and had {usual:.0f} before," if value < gate["share"] * usual else ""


def _window(name: str, gate: Mapping[str, Any], before: Sequence[StepMetrics]) -> list[float]:
    """The values to compare with; none until there are enough."""
    values = [value for step in before if (value := step.number(name)) is not None]
    return values if len(values) >= gate["window"] else []


_BAD = {NOT_A_NUMBER: _not_a_number, AGREEMENT: _agreement, REWARD: _reward, LENGTH: _length}


class GateWatch:
    """The gates of one attempt, fed with its steps as they are made."""

    def __init__(self, gates: Mapping[str, Any], before: Sequence[StepMetrics] = ()) -> None:
        """`before`: the steps that were trained up to where this attempt begins, ascending."""
        self._gates, self._keep = gates, look_back(gates) + 1
        self._steps: dict[int, StepMetrics] = {}
        for step in before[-self._keep :]:
            self._steps[step.step] = step
        self._told: set[tuple[str, str]] = set()

    def feed(self, record: StepMetrics) -> list[GateFinding]:
        """What is new with this step: each gate is told once per action. A step that comes again replaces itself."""
        self._steps = {step: known for step, known in self._steps.items() if step < record.step}
        self._steps[record.step] = record
        while len(self._steps) > self._keep:
            del self._steps[min(self._steps)]
        steps = [self._steps[step] for step in sorted(self._steps)]
        found = [one for one in check(self._gates, steps) if (one.gate, one.action) not in self._told]
        self._told |= {(one.gate, one.action) for one in found}
        return found


def proof(gates: Mapping[str, Any], merged: Sequence[StepMetrics], target: int | None = None) -> str:
    """What a proxy's steps say of rollout and actor: `proved`, or `not proved: ` and why. Pure.

    Every step that was trained must have agreed; `target` is the last step of the run, None: any.
    """
    least = gates[AGREEMENT]["least"]
    trained = [step for step in merged if step.trained]
    for step in trained:
        value = step.number(metrics.PEARSON)
        if value is None:
            return f"not proved: no Pearson at step {step.step}"
        if value < least:
            return f"not proved: Pearson {value:.4g} below {least:g} at step {step.step}"
    if not trained or (target is not None and trained[-1].step < target):
        return "not proved yet" if trained else "not proved: no step was trained"
    return f"{PROVED}: Pearson at least {min(step.data[metrics.PEARSON] or 0 for step in trained):.4g} in every step"
