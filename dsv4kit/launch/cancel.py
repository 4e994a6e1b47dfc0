"""Ending a run on its user's word, so that everything that reads the run later knows whose word it was."""

from __future__ import annotations

import time
from pathlib import Path

from dsv4kit.launch.run_dir import RunDir
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.state import attempts_of
from dsv4kit.run.files import write_json
from dsv4kit.run.outcome import CANCEL_MARK

_POLL_S = 0.2


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
    while (left := slurm.live(name)) and time.monotonic() < deadline:
        if not left.keys() <= seen:  # submitted meanwhile
            seen |= left.keys()
            slurm.cancel_named(name)
        time.sleep(_POLL_S)
    return len(seen), left


def mark_cancelled(run: RunDir) -> list[Path]:
    """Marks the segments that are not over, and the last one, by which the run is judged; the marks made."""
    segments = sorted((int(path.name) for path in run.path.glob("segments/*") if path.name.isdecimal()), reverse=True)
    made = []
    for segment in segments:
        attempts = attempts_of(run, segment)
        numbers = [int(path.name.removeprefix("attempt-")) for path in attempts]
        over = bool(attempts) and (attempts[-1] / "outcome.json").exists()
        mark = run.segment(segment) / CANCEL_MARK
        if (over and segment != segments[0]) or mark.exists():
            continue
        write_json(mark, {"from_attempt": numbers[-1] + over if numbers else 0})
        made.append(mark)
    return made
