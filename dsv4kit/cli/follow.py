"""Showing a run while it goes: a line whenever something has changed, until the chain is over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4kit.launch.run_dir import RunDir
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.launch.state import RunState, SegmentState

_POLL_S = 1.0
_EXIT_STATUS = {"finished": 0}


def follow(run: RunDir, slurm: Slurm) -> int:
    """Prints progress until the run is over. Exit status 0 when it finished, 1 when not."""
    from dsv4kit.launch.state import read_state

    seen: set[str] = set()
    try:
        while True:
            state = read_state(run, slurm)
            for line in progress_lines(state, _phase(run, state)):
                if line not in seen:
                    seen.add(line)
                    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)
            if state.over:
                break
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        print(f"\nthe run goes on; `dsv4kit status --run {run.name}` shows how, `dsv4kit cancel` ends it")
        return 130
    print(summary(state))
    return _EXIT_STATUS.get(state.verdict, 1)


def progress_lines(state: RunState, phase: str | None) -> list[str]:
    """Everything worth a line so far, oldest first; a caller prints those it has not printed yet."""
    lines = []
    for segment in state.segments:
        if segment.state == "RUNNING" or segment.attempts:
            where = f" on {segment.reason}" if segment.state == "RUNNING" else ""
            lines.append(f"segment {segment.segment}: started{where}" if where else "")
        if segment.state == "RUNNING" and phase:
            lines.append(f"segment {segment.segment}: {phase}")
        if segment.end_step is not None:
            lines += _steps(state, segment)
            lines.append(
                f"segment {segment.segment}: {segment.end}, steps {segment.start_step} to {segment.end_step} saved"
            )
            lines += [f"segment {segment.segment}:   {evidence}" for evidence in segment.evidence]
        elif segment.last_step is not None:
            lines += _steps(state, segment)
    return [line for line in lines if line]


def summary(state: RunState) -> str:
    """The last line."""
    measure, curve = state.measure
    values = list(curve.values())
    quarter = max(1, len(values) // 4)
    gain = ""
    if values:
        first, last = sum(values[:quarter]) / quarter, sum(values[-quarter:]) / quarter
        gain = f"; mean {measure} {first:.3f} in the first steps, {last:.3f} in the last"
    return f"run {state.run}: {state.verdict}, {state.reason}{gain}"


def _steps(state: RunState, segment: SegmentState) -> list[str]:
    begin, until = segment.start_step or 0, segment.last_step or segment.end_step or 0
    steps = range(begin + 1, until + 1)
    measure, curve = state.measure
    return [f"step {step}/{state.total_steps}: {measure} {curve[step]:.3f}" for step in steps if step in curve]


def _phase(run: RunDir, state: RunState) -> str | None:
    """The phase the running segment is in."""
    from dsv4kit.launch.state import attempts_of
    from dsv4kit.node.files import read_json_lines

    running = next((segment for segment in state.segments if segment.state == "RUNNING"), None)
    attempts = attempts_of(run, running.segment) if running else []
    marks = read_json_lines(attempts[-1] / "phases.jsonl") if attempts else []
    return str(marks[-1]["phase"]) if marks else None
