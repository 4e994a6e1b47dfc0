"""Ending a run on its user's word, so that everything that reads the run later knows whose word it was."""

from __future__ import annotations

import time
from pathlib import Path

from dsv4kit.launch.slurm import Slurm
from dsv4kit.run import outcome
from dsv4kit.run.directory import RunDir

_POLL_S = 0.2
# sbatch takes some 0.1 s; what comes later finds the mark that its segment is cancelled.
_SUBMITTING_S = 1.0


def cancel_run(run: RunDir, slurm: Slurm, patience_s: float = 10) -> tuple[int, dict[str, str]]:
    """Cancels the run's jobs by the name that only they have (also one that no file knows of), and looks again.

    Returns how many there were, and job id -> state of those still there after `patience_s`. The segments are marked
    first: an agent that Slurm ends writes its outcome at once.
    """
    name = run.job_name
    live = slurm.live(name)
    marks = mark_cancelled(run) if live else []
    try:
        slurm.cancel_named(name)
    except BaseException:
        for mark in marks:
            mark.unlink(missing_ok=True)
        raise
    seen, deadline = set(live), time.monotonic() + patience_s
    # A segment may just be submitting the next one, on another machine.
    look_until = time.monotonic() + (_SUBMITTING_S if live and _submits_by_itself(run) else 0)
    while (left := slurm.live(name)) or time.monotonic() < look_until:
        if time.monotonic() >= deadline:
            break
        if not left.keys() <= seen:  # submitted meanwhile
            seen |= left.keys()
            slurm.cancel_named(name)
        time.sleep(_POLL_S)
    return len(seen), left


def _submits_by_itself(run: RunDir) -> bool:
    return any(segment.submit_next_script.exists() for segment in run.segments())


def mark_cancelled(run: RunDir) -> list[Path]:
    """Marks the segments that are not over, and the last one, by which the run is judged; the marks made."""
    segments = run.segments()
    made = []
    for segment in reversed(segments):
        attempts = segment.attempts()
        over = bool(attempts) and attempts[-1].outcome_file.exists()
        if (over and segment != segments[-1]) or segment.cancel_file.exists():
            continue
        outcome.mark_cancelled(segment, from_attempt=attempts[-1].number + over if attempts else 0)
        made.append(segment.cancel_file)
    return made
