"""Ending a run on its user's word, so that everything that reads the run later knows whose word it was."""

from __future__ import annotations

from pathlib import Path

from dsv4kit.launch.run_dir import RunDir
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.state import ENDED, attempts_of
from dsv4kit.run.files import write_json
from dsv4kit.run.outcome import CANCEL_MARK

# What Slurm is ending already.
_OVER = (*ENDED, "COMPLETING")


def cancel_run(run: RunDir, slurm: Slurm) -> int:
    """Cancels the run's jobs by the name that only they have (also one that no file knows of); how many there were.

    The segments are marked first: an agent that Slurm ends writes its outcome at once.
    """
    live = [state for state in slurm.states_named(run.job_name) if state not in _OVER]
    marks = mark_cancelled(run) if live else []
    try:
        slurm.cancel_named(run.job_name)
    except BaseException:
        for mark in marks:
            mark.unlink(missing_ok=True)
        raise
    return len(live)


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
