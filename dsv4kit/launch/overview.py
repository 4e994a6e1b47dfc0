"""All runs at a glance: a few small files of each, never its whole curve."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dsv4kit.checkpoint import tracker
from dsv4kit.launch.progress import step_seconds
from dsv4kit.launch.slurm import JobState
from dsv4kit.launch.state import NOT_SUBMITTED, SegmentState, remembered_state, state_of
from dsv4kit.run import cost, metrics, node_spec, outcome, phases
from dsv4kit.run.directory import AttemptDir, RunDir
from dsv4kit.run.errors import DamagedFileError

_RECENT_STEPS = 10
_SITE = re.compile(rb"^site:\n(?:  .*\n)*?  name: (\S+)", re.MULTILINE)

_SUBMITTED = re.compile(rb"^submitted: '?([0-9T:+-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Overview:
    """One run; `damaged` says what of it cannot be read, and then most else is unknown.

    `step` is the last one trained; `value` the last reward, or loss for SFT; node-hours are those of its attempts,
    `node_hours_lost` what of them trained steps that no checkpoint holds. `age_s` since the submission.
    """

    run: str
    state: str
    reason: str = ""
    saved_step: int | None = None
    step: int | None = None
    total_steps: int | None = None
    step_s: float | None = None
    eta_s: float | None = None
    measure: str = "reward"
    value: float | None = None
    nodes: int | None = None
    node_hours: float = 0.0
    node_hours_lost: float = 0.0
    submitted: float = 0.0
    age_s: float = 0.0
    damaged: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def site_name(run: RunDir) -> str | None:
    """The site it was submitted to, without reading all of the YAML; None where it is not told."""
    try:
        found = _SITE.search(run.record_file.read_bytes())
    except OSError:
        return None
    return found[1].decode(errors="replace").strip("'\"") if found else None


def overview(
    run: RunDir, jobs: Mapping[str, JobState] | None, no_answer: str = "", now: float | None = None
) -> Overview:
    """The run as it is now. `jobs` are all of the user's, by id; None where Slurm gives no answer, `no_answer` why."""
    now = time.time() if now is None else now
    submitted = _submitted(run)
    try:
        return _overview(run, jobs, no_answer, submitted, now)
    except DamagedFileError as error:
        return Overview(run.name, "damaged", submitted=submitted, age_s=now - submitted, damaged=str(error))


def _overview(
    run: RunDir, jobs: Mapping[str, JobState] | None, no_answer: str, submitted: float, now: float
) -> Overview:
    spec = node_spec.read_as_dict(run)
    chain = run.chain()
    saved = tracker.read_tracker(Path(spec["checkpoint_dir"])) or 0
    segments, past = [], []
    held: dict[str, float] = {}
    latest: AttemptDir | None = None
    for link in chain:
        attempts = run.segment(link.segment).attempts()
        done = None
        for attempt in attempts:
            done = outcome.load(attempt)
            past += [done] if done else []
            latest = attempt
            for kind, seconds in _spent(attempt, done, now).items():
                held[kind] = held.get(kind, 0.0) + seconds
        known = (jobs or {}).get(link.job_id) or JobState("UNKNOWN" if jobs is None else remembered_state(done), "")
        state = NOT_SUBMITTED if not link.job_id else known.state
        segments.append(_segment(link.segment, link.job_id, state, known.reason, len(attempts), link.spare))
    cancelled = bool(chain) and run.segment(chain[-1].segment).cancel_file.exists()
    waiting = [segment.segment for segment in segments if not segment.over and not segment.attempts]
    goes_back = any(run.segment(number).request_file.exists() for number in waiting)
    state, reason = state_of(
        segments, {}, past, saved, spec["total_steps"], cancelled, goes_back, None if jobs is not None else no_answer
    )
    recent = _recent(run, latest)
    last = recent[-1] if recent else None
    rate = step_seconds([step for step in recent if step.trained])
    step = last.step if last else None
    left = spec["total_steps"] - max(step or 0, saved)
    nodes = spec.get("nodes")
    factor = (nodes or 1) / 3600
    loss = last is not None and metrics.SFT_LOSS in last.data
    return Overview(
        run=run.name,
        state=state,
        reason=reason,
        saved_step=saved,
        step=step,
        total_steps=spec["total_steps"],
        step_s=rate,
        eta_s=left * rate if rate is not None and state in ("running", "waiting") else None,
        measure="loss" if loss else "reward",
        value=last.data.get(metrics.SFT_LOSS if loss else metrics.REWARD) if last else None,
        nodes=nodes,
        node_hours=round(sum(held.values()) * factor, 3),
        node_hours_lost=round(held.get(cost.LOST, 0.0) * factor, 3),
        submitted=submitted,
        age_s=round(now - submitted, 1),
    )


def _segment(number: int, job_id: str, state: str, reason: str, attempts: int, spare: bool) -> SegmentState:
    return SegmentState(
        segment=number,
        job_id=job_id,
        state=state,
        reason=reason,
        attempts=attempts,
        start_step=None,
        end_step=None,
        target_step=None,
        last_step=None,
        reward=None,
        step_s=None,
        end=None,
        spare=spare,
    )


def _spent(attempt: AttemptDir, done: outcome.Outcome | None, now: float) -> dict[str, float]:
    try:
        marks, _ = phases.parse(attempt.phases_file.read_bytes().splitlines())
    except OSError:
        return {}
    if done is None and not _going_on(attempt, now):
        now = max((mark.time for mark in marks), default=now)
    return cost.spent(marks, [], done, now)


def _going_on(attempt: AttemptDir, now: float) -> bool:
    """Whether it has written lately: one that was lost left no outcome, and holds no nodes any more."""
    files = (attempt.driver_log, attempt.phases_file)
    return any(now - os.stat(path).st_mtime < 3600 for path in files if path.exists())


def _recent(run: RunDir, latest: AttemptDir | None) -> list[metrics.StepMetrics]:
    """The last records of the latest attempt that has any."""
    if latest is None:
        return []
    for attempt in reversed(run.attempts()):
        if found := metrics.last_records(attempt.metrics_file, _RECENT_STEPS):
            return found
    return []


def _submitted(run: RunDir) -> float:
    """Seconds since the epoch; of a record that does not say it, when it was written."""
    try:
        if found := _SUBMITTED.search(run.record_file.read_bytes()):
            return datetime.strptime(found[1].decode(), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (OSError, ValueError):
        pass
    try:
        return os.stat(run.record_file).st_mtime
    except OSError:
        return 0.0
