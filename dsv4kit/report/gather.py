"""Everything a report says, as plain values, read from the run directory alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from dsv4kit.checkpoint import tracker
from dsv4kit.launch.progress import last_validation
from dsv4kit.launch.run_dir import predicted, read_record
from dsv4kit.report import memory, reward
from dsv4kit.run import cost, ends, exclusions, metrics, node_spec
from dsv4kit.run.directory import RunDir
from dsv4kit.run.errors import DamagedFileError
from dsv4kit.run.metrics import StepMetrics
from dsv4kit.run.reader import AttemptReader, RunReader

# Parts of a step that verl times; together with what is left they are its whole.
PARTS = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "save_checkpoint")
QUEUE = "queue"


class RunFacts(NamedTuple):
    """One run. Times are seconds since the epoch, `hours` node-hours by what they went into, `steps` the merged curve.

    `attempts` are in the order they ran; `resumes` compare the curve before and after each start; `compared` holds
    what the planner said beside what was measured.
    """

    run: str
    directory: str
    made: float
    saved_step: int
    total_steps: int
    nodes: int
    record: Mapping[str, Any]
    problems: list[str]
    steps: list[StepMetrics]
    attempts: list[dict[str, Any]]
    resumes: list[dict[str, Any]]
    first_steps: list[dict[str, Any]]
    hours: dict[str, float]
    queue_s: float
    lost_to: dict[str, float]
    excluded: list[dict[str, Any]]
    memory: memory.Memories
    reward: reward.Reading
    validation: dict[str, float]
    compared: list[dict[str, Any]]
    plan: Mapping[str, Any]

    def curve(self, name: str) -> tuple[list[int], list[float | None]]:
        """A metric over the steps that have it; None where it was no number."""
        found = [(step.step, step.data[name]) for step in self.steps if name in step.data]
        return [step for step, _ in found], [value for _, value in found]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: without the samples and with the curve as verl wrote it."""
        shown = self._asdict()
        shown["steps"] = [{"step": step.step, "data": dict(step.data)} for step in self.steps]
        shown["memory"] = [vars_of(node) for node in self.memory.nodes]
        shown["reward"] = self.reward._asdict()
        return shown


def vars_of(node: memory.NodeMemorySeen) -> dict[str, Any]:
    """A node without its samples."""
    return {key: value for key, value in node._asdict().items() if key not in ("times", "host", "gpu")}


def gather(run: RunDir, now: float | None = None) -> RunFacts:
    """The facts of a run. Raises DamagedFileError where not even node.json and chain.json can be read."""
    now = time.time() if now is None else now
    spec = node_spec.read_as_dict(run)
    problems: list[str] = []
    try:
        record: Mapping[str, Any] = read_record(run)
    except DamagedFileError as error:
        record, problems = {}, [str(error)]
    plan = predicted(run)
    attempts = [attempt for of_segment in RunReader(run).look().values() for attempt in of_segment]
    nodes = int(spec.get("nodes") or 1)
    merged = metrics.merge([attempt.steps[step] for step in sorted(attempt.steps)] for attempt in attempts)
    if not merged:
        problems.append("no metrics: no step has been trained yet, or they cannot be read")
    rows = [_attempt(attempt, nodes, now) for attempt in attempts]
    hours, lost_to = _hours(rows, nodes)
    seen = memory.seen(attempts, plan)
    firsts = _first_steps(attempts)
    facts = RunFacts(
        run=run.name,
        directory=str(run.path),
        made=now,
        saved_step=tracker.read_tracker(Path(spec["checkpoint_dir"])) or 0,
        total_steps=spec["total_steps"],
        nodes=nodes,
        record=record,
        problems=problems,
        steps=merged,
        attempts=rows,
        resumes=_resumes(attempts),
        first_steps=firsts,
        hours=hours,
        queue_s=_queue_s(rows),
        lost_to=lost_to,
        excluded=[vars(one) for one in exclusions.active(run, now)],
        memory=seen,
        reward=reward.read(merged, _max_response(record)),
        validation=last_validation(merged),
        compared=[],
        plan=plan,
    )
    return facts._replace(compared=_compared(facts, rows))


def _max_response(record: Mapping[str, Any]) -> int | None:
    value = record.get("settings", {}).get("data", {}).get("max_response_length") if record else None
    return value if isinstance(value, int) else None


def _attempt(attempt: AttemptReader, nodes: int, now: float) -> dict[str, Any]:
    done = attempt.outcome
    marks = attempt.marks
    began = marks[0].time if marks else done.started if done else None
    # One that left no outcome and does not write any more was lost then.
    last = max((mark.time for mark in marks), default=now)
    until = done.ended if done else last if now - last > 3600 and not attempt.steps else now
    steps = [attempt.steps[step] for step in sorted(attempt.steps)]
    spent = cost.spent(marks, steps, done, until)
    return {
        "segment": attempt.directory.segment.number,
        "attempt": attempt.directory.number,
        "start": attempt.course.start if attempt.course else done.start if done else None,
        "target": attempt.course.target if attempt.course else done.target if done else None,
        "reached": done.reached if done else None,
        "last_step": max(attempt.steps, default=None),
        "end": done.end if done else None,
        "reason": done.reason if done else "",
        "evidence": list(done.evidence) if done else [],
        "notes": list(done.notes) if done else list(attempt.notes),
        "nodes": list(done.nodes) if done else [],
        "began": began,
        "ended": done.ended if done else None,
        "seconds": {kind: round(seconds, 1) for kind, seconds in spent.items()},
        "node_hours": round(cost.node_hours(spent, nodes), 3),
        "fault": bool(done and done.end not in (ends.COMPLETED, ends.STOPPED, ends.NOTHING_TO_DO)),
    }


def _hours(rows: Sequence[Mapping[str, Any]], nodes: int) -> tuple[dict[str, float], dict[str, float]]:
    """Node-hours by what they went into, and those that were lost by the end that lost them."""
    hours: dict[str, float] = {}
    lost: dict[str, float] = {}
    for row in rows:
        for kind, seconds in row["seconds"].items():
            hours[kind] = hours.get(kind, 0.0) + seconds * nodes / 3600
            if kind == cost.LOST:
                lost[row["end"]] = lost.get(row["end"], 0.0) + seconds * nodes / 3600
    return hours, lost


def _queue_s(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds between the end of one segment's last attempt and the begin of the next segment's first."""
    waited = 0.0
    for before, after in pairwise(rows):
        if before["segment"] != after["segment"] and before["ended"] and after["began"]:
            waited += max(0.0, after["began"] - before["ended"])
    return waited


def _resumes(attempts: Sequence[AttemptReader]) -> list[dict[str, Any]]:
    """The curve before and after each start that resumed."""
    found = []
    curve: dict[int, StepMetrics] = {}
    for attempt in attempts:
        trained = [step for step in sorted(attempt.steps) if attempt.steps[step].trained]
        start = attempt.course.start if attempt.course else None
        if trained and start:
            first = attempt.steps[trained[0]]
            before = curve.get(start)
            found.append(
                {
                    "segment": attempt.directory.segment.number,
                    "attempt": attempt.directory.number,
                    "from_step": start,
                    "first_step": first.step,
                    "in_order": first.step == start + 1,
                    "again": sum(1 for step in trained if step in curve),
                    "learning_rate": [
                        _first_of(before, metrics.LEARNING_RATES),
                        _first_of(first, metrics.LEARNING_RATES),
                    ],
                    "value": [_first_of(one, (metrics.REWARD, metrics.SFT_LOSS)) for one in (before, first)],
                    "usual_change": _usual_change(curve, start),
                }
            )
        curve |= {step: attempt.steps[step] for step in trained}
    return found


def _usual_change(curve: Mapping[int, StepMetrics], until: int) -> float | None:
    """Median change of reward or loss from one step to the next, over the 20 steps before."""
    values = [_first_of(curve.get(step), (metrics.REWARD, metrics.SFT_LOSS)) for step in range(until - 20, until + 1)]
    changes = [abs(b - a) for a, b in pairwise(values) if a is not None and b is not None]
    return median(changes) if changes else None


def _first_of(step: StepMetrics | None, names: Sequence[str]) -> float | None:
    return next((step.data[name] for name in names if name in step.data), None) if step else None


def _first_steps(attempts: Sequence[AttemptReader]) -> list[dict[str, Any]]:
    found = []
    for attempt in attempts:
        took = [
            seconds
            for step in sorted(attempt.steps)
            if attempt.steps[step].trained and (seconds := attempt.steps[step].data.get(metrics.STEP_TIME)) is not None
        ]
        if len(took) > 2:
            name = f"{attempt.directory.segment.number}.{attempt.directory.number}"
            found.append({"start": name, "first_s": took[0], "usual_s": median(took[1:])})
    return found


def _compared(facts: RunFacts, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The planner's numbers beside the measured ones; a number without a measurement is named all the same."""
    plan = facts.plan
    if not plan:
        return []
    found: list[dict[str, Any]] = []

    def add(name: str, unit: str, said: float | None, seen: float | None) -> None:
        if said is not None:
            found.append({"name": name, "unit": unit, "predicted": said, "measured": seen})

    step = plan.get("step", {})
    usual = _median(first["usual_s"] for first in facts.first_steps)
    add("steady step", "s", step.get("steady_s"), usual)
    cold = facts.first_steps[0]["first_s"] if facts.first_steps else None
    add("first step of the run", "s", step.get("first_s"), cold)
    warm = _median(first["first_s"] for first in facts.first_steps[1:])
    add("first step after a resume", "s", step.get("first_warm_s"), warm)
    for name, key, metric in (
        ("generation", "generation_s", metrics.GENERATION_TIME),
        ("weight update", "update_weights_s", metrics.WEIGHT_SYNC_TIME),
    ):
        add(name, "s", step.get(key), _median(value for value in facts.curve(metric)[1] if value is not None))
    save = [value for value in facts.curve(metrics.SAVE_TIME)[1] if value]
    add("save", "s", plan.get("segment", {}).get("save_s"), _median(save))
    starts = [row["seconds"].get(cost.START) for row in rows if row["seconds"].get(cost.STEPS)]
    add("start of a segment", "s", plan.get("segment", {}).get("setup_s"), _median(one for one in starts if one))
    held = sum(facts.hours.values())
    whole = facts.saved_step >= facts.total_steps
    add("node-hours of the run", "h", plan.get("segment", {}).get("node_hours"), held if whole else None)
    useful = facts.hours.get(cost.STEPS, 0.0) / held if held else None
    add("share of the time that trains", "", plan.get("segment", {}).get("useful"), useful)
    for stage, host, gpu in facts.memory.kinds(plan):
        add(f"host memory, {stage}", "GiB", host[0], host[1])
        add(f"GPU memory, {stage}", "GiB", gpu[0], gpu[1])
    return found


def _median(values: Any) -> float | None:
    found = list(values)
    return median(found) if found else None
