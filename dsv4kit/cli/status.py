"""`dsv4kit status`: how a run is doing, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.follow import what_next
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.text_table import aligned

if TYPE_CHECKING:
    from dsv4kit.launch.state import RunState, SegmentState

_COLUMNS = ("segment", "job", "state", "steps", "{measure}", "s/step", "where the time went (s)", "end")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "Show the segments of a run."
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    add_variables(parser, BY_VERB["status"])


def run(args: argparse.Namespace) -> int:
    """Prints the state."""
    from dsv4kit.cli.runs import chosen_name, open_run
    from dsv4kit.launch.state import read_state

    state = read_state(*open_run(chosen_name(args)))
    print(json.dumps(state.as_dict(), indent=1) if args.json else table(state))
    return 0


def table(state: RunState) -> str:
    """The state for people."""
    measure, curve = state.measure
    rows = [
        tuple(column.format(measure=measure) for column in _COLUMNS),
        *(_row(segment, measure) for segment in state.segments),
    ]
    last = f", last {measure} {curve[max(curve)]:.3f}" if curve else ""
    head = f"{state.run}: {state.state}, {state.saved_step} of {state.total_steps} steps saved{last}"
    notes = [f"segment {segment.segment}: {line}" for segment in state.segments for line in _notes(segment)]
    notes += [f"avoids {one['node']} since segment {one['segment']}: {one['reason']}" for one in state.excluded_nodes]
    notes += [
        f"job {job_id} ({job_state}) is in the queue and no segment is known to have it: the submission was cut short"
        for job_id, job_state in state.other_jobs.items()
    ]
    reason = [state.reason] if state.reason else []
    return "\n".join([head, state.directory, *reason, *what_next(state), "", *aligned(rows), *notes])


def _notes(segment: SegmentState) -> list[str]:
    changed = [f"changed: {key}: {old} -> {new}" for key, (old, new) in segment.changes.items()]
    return [*changed, *segment.evidence, *(f"note: {note}" for note in segment.notes)]


def _row(segment: SegmentState, measure: str) -> tuple[str, ...]:
    value = segment.loss if measure == "loss" else segment.reward
    until = segment.end_step if segment.end_step is not None else segment.last_step
    steps = "" if segment.start_step is None else f"{segment.start_step}-{until if until is not None else '?'}"
    return (
        f"{segment.segment}{' (spare)' if segment.spare else ''}",
        segment.job_id,
        segment.state,
        f"{steps} of {segment.target_step}" if steps else "",
        "" if value is None else f"{value:.3f}",
        "" if segment.step_s is None else f"{segment.step_s:.1f}",
        ", ".join([f"{phase} {seconds:.0f}" for phase, seconds in segment.seconds.items()] + _now(segment)),
        segment.end or "",
    )


def _now(segment: SegmentState) -> list[str]:
    if not segment.phase:
        return []
    usual = f" (usually {segment.usual_s:.0f})" if segment.usual_s is not None else ""
    return [f"now {segment.phase} {segment.phase_s:.0f}{usual}"]
