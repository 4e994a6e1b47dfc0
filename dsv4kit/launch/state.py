"""The state of a run, read from its directory and Slurm's queue: what `status` shows and `submit` follows."""

from __future__ import annotations

import itertools
import math
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4kit.checkpoint import tracker
from dsv4kit.errors import UserError
from dsv4kit.launch import changes
from dsv4kit.launch.run_dir import ChainLink, RunDir
from dsv4kit.launch.slurm import ENDED, JobState, Slurm
from dsv4kit.node.resume import REQUEST
from dsv4kit.run import metrics, outcome
from dsv4kit.run.files import read_json, read_json_lines
from dsv4kit.run.outcome import Outcome

_ATTEMPT = re.compile(r"attempt-\d+")


@dataclass(frozen=True)
class SegmentState:
    """One segment. Steps are absolute; `end_step` is what is saved; `seconds` tells where the time went, by phase.

    `changes`: settings that it has otherwise than the segment before, each with what it was and is. `phase` and
    `phase_s` are what a running one does now, and for how long.
    """

    segment: int
    job_id: str
    state: str
    reason: str
    attempts: int
    start_step: int | None
    end_step: int | None
    target_step: int | None
    last_step: int | None
    reward: float | None
    step_s: float | None
    end: str | None
    loss: float | None = None
    evidence: list[str] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    phase: str | None = None
    phase_s: float | None = None

    @property
    def over(self) -> bool:
        """Whether Slurm is done with it."""
        return self.state in ENDED


@dataclass(frozen=True)
class RunState:
    """A run and its segments.

    `verdict`: waiting, running, finished, cancelled (by the user), stopped (by itself), incomplete (the chain is used
    up) or unknown.
    """

    run: str
    directory: str
    verdict: str
    reason: str
    saved_step: int
    total_steps: int
    last_reward: float | None
    rewards: dict[int, float]
    losses: dict[int, float]
    segments: list[SegmentState]

    @property
    def measure(self) -> tuple[str, dict[int, float]]:
        """What shows whether the run learns, by step: GRPO's mean reward, or SFT's loss."""
        return ("loss", self.losses) if self.losses and not self.rewards else ("reward", self.rewards)

    @property
    def over(self) -> bool:
        """Whether nothing more happens by itself."""
        return self.verdict not in ("waiting", "running", "unknown")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def read_state(run: RunDir, slurm: Slurm) -> RunState:
    """The state now; where Slurm does not answer, from what is on disk alone."""
    chain = run.chain()
    try:
        jobs = slurm.states(link.job_id for link in chain)
    except UserError as error:
        jobs = {link.job_id: JobState("UNKNOWN", str(error)) for link in chain}
    segments = [_segment(run, link, jobs.get(link.job_id)) for link in chain]
    spec = run.node_spec()
    saved = tracker.read_tracker(Path(spec["checkpoint_dir"])) or 0
    rewards, losses = _curve(run, metrics.REWARD), _curve(run, metrics.SFT_LOSS)
    # The last segment has been marked, and the marks are made before the jobs are cancelled.
    cancelled = bool(chain) and (run.segment(chain[-1].segment) / outcome.CANCEL_MARK).exists()
    # A segment that has not begun may be one that goes back to an older step: what is saved is then not the end.
    waiting = (segment for segment in segments if not segment.over and not segment.attempts)
    goes_back = any((run.segment(segment.segment) / REQUEST).exists() for segment in waiting)
    verdict, reason = _verdict(segments, outcome.history(run.path), saved, spec["total_steps"], cancelled, goes_back)
    return RunState(
        run=run.name,
        directory=str(run.path),
        verdict=verdict,
        reason=reason,
        saved_step=saved,
        total_steps=spec["total_steps"],
        last_reward=rewards[max(rewards)] if rewards else None,
        rewards=rewards,
        losses=losses,
        segments=segments,
    )


def attempts_of(run: RunDir, segment: int) -> list[Path]:
    """Attempt directories of a segment, oldest first."""
    found = [path for path in run.segment(segment).glob("attempt-*") if _ATTEMPT.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("attempt-")))


def _segment(run: RunDir, link: ChainLink, job: JobState | None) -> SegmentState:
    attempts = attempts_of(run, link.segment)
    latest = attempts[-1] if attempts else None
    planned = (latest and read_json(latest / "plan.json")) or {}
    planned = planned if isinstance(planned, dict) else {}
    done = outcome.load(latest / "outcome.json") if latest else None
    last = metrics.last_metrics(latest / "metrics.jsonl") if latest and (latest / "metrics.jsonl").is_file() else None
    state = job or JobState(_remembered_state(done), "Slurm no longer knows the job")
    marks = _marks(latest) if latest else []
    phase, since = marks[-1] if marks and state.state == "RUNNING" and not done else (None, 0.0)
    return SegmentState(
        segment=link.segment,
        job_id=link.job_id,
        state=state.state,
        reason=state.reason,
        attempts=len(attempts),
        start_step=planned.get("start"),
        target_step=planned.get("target"),
        end_step=done.reached if done else None,
        last_step=last.step if last else None,
        reward=last.data.get(metrics.REWARD) if last else None,
        step_s=last.data.get(metrics.STEP_TIME) if last else None,
        end=done.end if done else None,
        loss=last.data.get(metrics.SFT_LOSS) if last else None,
        evidence=done.evidence if done else [],
        changes=changed if isinstance(changed := read_json(run.segment(link.segment) / changes.FILE), dict) else {},
        seconds=_seconds(marks, done),
        phase=phase,
        phase_s=round(max(0.0, time.time() - since), 1) if phase else None,
    )


def _remembered_state(done: Outcome | None) -> str:
    if done is None:
        return "CANCELLED"  # it left nothing: it never ran
    return "FAILED" if done.verdict == outcome.STOP else "COMPLETED"


def _marks(attempt: Path) -> list[tuple[str, float]]:
    """The phases of an attempt and when each began."""
    marks = read_json_lines(attempt / "phases.jsonl")
    whole = [mark for mark in marks if isinstance(mark, dict) and isinstance(mark.get("time"), int | float)]
    return [(str(mark.get("phase")), float(mark["time"])) for mark in whole]


def _seconds(marks: list[tuple[str, float]], done: Outcome | None) -> dict[str, float]:
    """Seconds per phase of an attempt; the one still going on is left out."""
    times = [*marks, ("over", done.ended)] if done else marks
    return {phase: round(until - since, 1) for (phase, since), (_, until) in itertools.pairwise(times)}


def _curve(run: RunDir, name: str) -> dict[int, float]:
    """Step -> metric over the whole run; a step done again counts by its later attempt."""
    segments = sorted(int(path.name) for path in run.path.glob("segments/*") if path.name.isdecimal())
    files = [attempt / "metrics.jsonl" for segment in segments for attempt in attempts_of(run, segment)]
    merged = metrics.merge(metrics.read_metrics(path) for path in files if path.is_file())
    found = {step.step: step.data.get(name) for step in merged}
    return {step: value for step, value in found.items() if value is not None and math.isfinite(value)}


def _verdict(
    segments: list[SegmentState], past: list[Outcome], saved: int, total: int, cancelled: bool, goes_back: bool
) -> tuple[str, str]:
    live = [segment for segment in segments if not segment.over and segment.state != "UNKNOWN"]
    if saved >= total and not goes_back and not any(segment.state in ("RUNNING", "COMPLETING") for segment in live):
        return "finished", f"all {total} steps are saved"
    if any(segment.state in ("RUNNING", "COMPLETING") for segment in live):
        return "running", ""
    if live:
        return "waiting", live[0].reason
    if cancelled:
        return "cancelled", f"by the user; step {saved} of {total} is saved"
    if past and past[-1].verdict == outcome.STOP:
        return "stopped", past[-1].reason
    if segments and all(segment.state == "UNKNOWN" for segment in segments):
        return "unknown", segments[0].reason
    return "incomplete", f"step {saved} of {total} is saved and no segment is left"
