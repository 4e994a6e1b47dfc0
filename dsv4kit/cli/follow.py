"""Showing a run while it goes: a line whenever something has changed, until the chain is over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dsv4kit import hints
from dsv4kit.run import phases

if TYPE_CHECKING:
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.launch.state import RunState, SegmentState
    from dsv4kit.run.directory import RunDir

_POLL_S = 1.0
_EXIT_STATUS = {"finished": 0}


def follow(run: RunDir, slurm: Slurm, first: int = 1) -> int:
    """Prints progress from the segment `first` on until the run is over. Exit status 0 when it finished, 1 when not."""
    from dsv4kit.cli.report import written_at_the_end
    from dsv4kit.launch.state import StateReader

    reader = StateReader(run, slurm)
    seen: set[str] = set()
    try:
        while True:
            state = reader.read()
            for line in progress_lines(state, first):
                if line not in seen:
                    seen.add(line)
                    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)
            if state.over:
                break
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        shows, ends = hints.command("status", RUN=run.name), hints.command("cancel", RUN=run.name)
        print(f"\nthe run goes on; `{shows}` shows how, `{ends}` ends it")
        return 130
    print(summary(state))
    if written := written_at_the_end(run, state):
        print(f"report: {written}")
    return _EXIT_STATUS.get(state.state, 1)


def progress_lines(state: RunState, first: int = 1) -> list[str]:
    """Everything worth a line in the segments from `first` on; a caller prints those lines it has not printed yet."""
    lines = []
    for segment in state.segments:
        if segment.segment < first:
            continue
        if segment.state == "RUNNING" or segment.attempts:
            where = f" on {segment.reason}" if segment.state == "RUNNING" else ""
            lines.append(f"segment {segment.segment}: started{where}" if where else "")
        if segment.phase:
            lines.append(f"segment {segment.segment}: {phase_line(segment)}{_where_to_look(state, segment)}")
        lines += [f"segment {segment.segment}: note: {note}" for note in segment.notes]
        if segment.end_step is not None:
            lines += _steps(state, segment)
            lines.append(
                f"segment {segment.segment}: {segment.end}, steps {segment.start_step} to {segment.end_step} saved"
            )
            lines += [f"segment {segment.segment}:   {evidence}" for evidence in segment.evidence]
        elif segment.last_step is not None:
            lines += _steps(state, segment)
    if state.state == "unknown":
        lines.append(f"waiting for Slurm to answer: {state.reason}")
    return [line for line in lines if line]


def phase_line(segment: SegmentState) -> str:
    """What a running segment does now, and how long that usually takes."""
    phase = str(segment.phase)
    meaning = f": {phases.MEANINGS[phase]}" if phase in phases.MEANINGS else ""
    usual = f" (usually {segment.usual_s:.0f} s)" if segment.usual_s is not None else ""
    return f"{phase}{meaning}{usual}"


def _where_to_look(state: RunState, segment: SegmentState) -> str:
    """The trainer is silent for the longest part of its start, which is normal."""
    if segment.phase != phases.IMPORT:
        return ""
    return f"; `{hints.command('logs', RUN=state.run, FOLLOW=1)}` shows its log"


def summary(state: RunState) -> str:
    """The last line: how it ended, and what can be done about it."""
    measure, curve = state.measure
    values = list(curve.values())
    quarter = max(1, len(values) // 4)
    gain = ""
    if values:
        first, last = sum(values[:quarter]) / quarter, sum(values[-quarter:]) / quarter
        gain = f"; mean {measure} {first:.3f} in the first {_count(quarter)}, {last:.3f} in the last {_count(quarter)}"
    return f"run {state.run}: {state.state}, {state.reason}{gain}" + "".join(f"\n{line}" for line in what_next(state))


def _count(steps: int) -> str:
    return "step" if steps == 1 else f"{steps} steps"


def what_next(state: RunState) -> list[str]:
    """The commands that show why a run is over before it is finished, and go on with it; nothing for other runs."""
    if not state.over or state.state == "finished":
        return []
    tried = [segment.segment for segment in state.segments if segment.attempts]
    why = f"`{hints.command('logs', RUN=state.run, SEGMENT=tried[-1])}` shows its log, " if tried else ""
    return [f"{why}`{hints.command('resume', RUN=state.run)}` goes on"]


def _steps(state: RunState, segment: SegmentState) -> list[str]:
    begin, until = segment.start_step or 0, segment.last_step or segment.end_step or 0
    steps = range(begin + 1, until + 1)
    measure, curve = state.measure
    return [f"step {step}/{state.total_steps}: {measure} {curve[step]:.3f}" for step in steps if step in curve]
