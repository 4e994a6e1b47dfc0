"""`dsv4kit status`: how a run is doing, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.follow import what_next
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.text_table import aligned, coloured, duration, plain, terminal_width, wrapped

if TYPE_CHECKING:
    from dsv4kit.launch.progress import Peak
    from dsv4kit.launch.state import RunState, SegmentState
    from dsv4kit.run.directory import RunDir

_COLUMNS = ("segment", "job", "state", "steps", "{measure}", "s/step", "end")
_ACCURACIES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "Show the segments of a run."
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    add_variables(parser, BY_VERB["status"])


def run(args: argparse.Namespace) -> int:
    """Prints the state."""
    from dsv4kit.cli.report import written_at_the_end
    from dsv4kit.cli.runs import chosen_name, open_run
    from dsv4kit.launch.progress import memory_peaks
    from dsv4kit.launch.state import read_state

    run_dir, slurm = open_run(chosen_name(args))
    state = read_state(run_dir, slurm)
    peaks, planned = memory_peaks(run_dir), planned_memory(run_dir)
    if args.json:
        memory = {kind: {**vars(peak), "planned_gib": planned.get(kind)} for kind, peak in peaks.items()}
        print(json.dumps(state.as_dict() | {"memory": memory}, indent=1))
    else:
        print(coloured(table(state, peaks, planned, terminal_width())))
        if written := written_at_the_end(run_dir, state):
            print(f"report: {written}")
    return 0


def planned_memory(run: RunDir) -> dict[str, float]:
    """What the planner said when the run was submitted, GiB: `host` of the fullest node, `GPU` of the fullest stage."""
    from dsv4kit.launch.run_dir import predicted

    plan = predicted(run)
    found = {}
    if nodes := plan.get("host", {}).get("nodes"):
        found["host"] = round(max(node["physical_gb"] for node in nodes) * 1e9 / 2**30, 1)
    if stages := plan.get("gpu", {}).get("stages"):
        found["GPU"] = round(max(stage["need_gib"] for stage in stages), 1)
    return found


def table(
    state: RunState,
    peaks: Mapping[str, Peak] | None = None,
    planned: Mapping[str, float] | None = None,
    width: int | None = None,
) -> str:
    """The state for people, `width` columns wide; None leaves lines as long as they are."""
    measure, curve = state.measure
    rows = [
        tuple(column.format(measure=measure) for column in _COLUMNS),
        *(_row(segment, measure) for segment in state.segments),
    ]
    last = f", last {measure} {curve[max(curve)]:.3f}" if curve else ""
    head = f"{state.run}: {state.state}, {state.saved_step} of {state.total_steps} steps saved{last}"
    notes = [line for segment in state.segments for line in _times(segment)]
    notes += [f"segment {segment.segment}: {line}" for segment in state.segments for line in _notes(segment)]
    notes += [f"avoids {one['node']} since segment {one['segment']}: {one['reason']}" for one in state.excluded_nodes]
    notes += [
        f"job {job_id} ({job_state}) is in the queue and no segment is known to have it: the submission was cut short"
        for job_id, job_state in state.other_jobs.items()
    ]
    reason = [state.reason] if state.reason else []
    if state.origin:
        reason.append(f"began with step {state.origin.get('step')} of the run {state.origin.get('run')}")
    if state.proof:
        reason.append(f"as a proof of this site: {state.proof}")
    above = [head, state.directory, *reason, *_progress(state), *_memory(peaks or {}, planned or {}), *what_next(state)]
    lines = [*above, "", *(line if width is None else line[:width] for line in aligned(rows)), *notes]
    return "\n".join(part for line in lines for part in (wrapped(plain(line), width) if line else [line]))


def _progress(state: RunState) -> list[str]:
    """Time left, and the last values of what tells whether it trains well."""
    progress, lines = state.progress, []
    if progress.step_s is not None and not state.over:
        left = "" if progress.eta_s is None else f", about {duration(progress.eta_s)} left, queues apart"
        lines.append(f"step {progress.step}: {progress.step_s:.1f} s a step{left}")
    if progress.pearson is not None:
        lines.append(f"rollout and actor agree to {progress.pearson:.4f} (Pearson; 1 is full)")
    shown = list(progress.accuracy.items())[:_ACCURACIES]
    lines += [f"validation: {', '.join(f'{name} {value:.3f}' for name, value in shown)}"] if shown else []
    if bad := progress.not_numbers:
        which = ", ".join(map(str, bad[:5])) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        lines.append(f"not a number: the {state.measure[0]} of step {which}")
    return lines


def _memory(peaks: Mapping[str, Peak], planned: Mapping[str, float]) -> list[str]:
    found = []
    for kind, peak in peaks.items():
        plan = f", {planned[kind]:.0f} planned" if kind in planned else ""
        found.append(f"{kind} {peak.gib:.0f} GiB on {peak.node}{plan}")
    return [f"memory peaks: {'; '.join(found)}"] if found else []


def _times(segment: SegmentState) -> list[str]:
    """Where its time went, in seconds."""
    parts = [f"{phase} {seconds:.0f}" for phase, seconds in segment.seconds.items()] + _now(segment)
    return [f"segment {segment.segment}, seconds: {', '.join(parts)}"] if parts else []


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
        segment.end or "",
    )


def _now(segment: SegmentState) -> list[str]:
    if not segment.phase:
        return []
    usual = f" (usually {segment.usual_s:.0f})" if segment.usual_s is not None else ""
    return [f"now {segment.phase} {segment.phase_s:.0f}{usual}"]
