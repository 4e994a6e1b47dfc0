"""The state of a run, read from its directory and Slurm's queue: what `status` shows and `submit` follows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dsv4kit.checkpoint import tracker
from dsv4kit.errors import UserError
from dsv4kit.launch.pending import in_words
from dsv4kit.launch.progress import RunProgress, progress_of
from dsv4kit.launch.slurm import ENDED, JobState, Slurm
from dsv4kit.launch.usual import UsualPhases
from dsv4kit.run import exclusions, gates, metrics, node_spec, outcome, phases
from dsv4kit.run.directory import ChainLink, RunDir, SegmentDir
from dsv4kit.run.files import read_object, tail
from dsv4kit.run.outcome import Outcome
from dsv4kit.run.phases import Mark
from dsv4kit.run.reader import AttemptReader, RunReader

NOT_SUBMITTED = "NOT SUBMITTED"
# As templates/segment.sbatch.j2 ends the one line with its reason.
_STARTED_NOTHING = "; nothing is started"
_LAST_TRY = "not submitted yet: "


@dataclass(frozen=True)
class SegmentState:
    """One segment. Steps are absolute; `end_step` is what is saved; `seconds` tells where the time went, by phase.

    `state` is Slurm's, or NOT_SUBMITTED. `spare`: it is one more than the run's steps take, for one that fails.
    `changes`: settings that it has otherwise than the segment before, each with what it was and is. `phase` and
    `phase_s` are what a running one does now, and for how long; `usual_s` is how long that usually takes, where it is
    known. `notes`: what a reader should know that did not end it.
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
    usual_s: float | None = None
    notes: list[str] = field(default_factory=list)
    spare: bool = False

    @property
    def over(self) -> bool:
        """Whether Slurm is done with it, or never heard of it."""
        return self.state in (*ENDED, NOT_SUBMITTED)


@dataclass(frozen=True)
class RunState:
    """A run and its segments.

    `state`: waiting, running, finished, cancelled (by the user), stopped (by itself), incomplete (the chain is used
    up) or unknown. `excluded_nodes`: nodes the run avoids now, with when, in which segment and why. `other_jobs`: jobs
    of the run in the queue that none of its segments is known to have, with their states. A spare segment that was not
    needed is left out once the run is over. `origin`: run, directory and step of the checkpoint it began with, if it is
    another run's. `proof`: of a proxy that has trained, whether rollout and actor agreed in all its steps.
    """

    run: str
    directory: str
    state: str
    reason: str
    saved_step: int
    total_steps: int
    last_reward: float | None
    rewards: dict[int, float]
    losses: dict[int, float]
    segments: list[SegmentState]
    excluded_nodes: list[dict[str, Any]] = field(default_factory=list)
    other_jobs: dict[str, str] = field(default_factory=dict)
    progress: RunProgress = field(default_factory=RunProgress)
    origin: dict[str, Any] = field(default_factory=dict)
    proof: str | None = None

    @property
    def measure(self) -> tuple[str, dict[int, float]]:
        """What shows whether the run learns, by step: GRPO's mean reward, or SFT's loss."""
        return ("loss", self.losses) if self.losses and not self.rewards else ("reward", self.rewards)

    @property
    def over(self) -> bool:
        """Whether nothing more happens by itself."""
        return _over(self.state)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class StateReader:
    """The state of one run again and again: each file is read once, then only what it has gained."""

    def __init__(self, run: RunDir, slurm: Slurm) -> None:
        self._run, self._slurm = run, slurm
        self._files, self._usual = RunReader(run), UsualPhases(run)

    def read(self) -> RunState:
        """The state now; where Slurm does not answer, from what is on disk alone."""
        run = self._run
        chain = run.chain()
        ids = [link.job_id for link in chain if link.job_id]
        no_answer = None
        try:
            jobs = self._slurm.states(ids, run.job_name)
        except UserError as error:
            no_answer = str(error)
            jobs = {job_id: JobState("UNKNOWN", no_answer) for job_id in ids}
        others = {job_id: job.state for job_id, job in jobs.items() if job_id not in ids and job.state not in ENDED}
        files = self._files.look()
        segments = [self._segment(link, jobs.get(link.job_id), files) for link in chain]
        spec = node_spec.read_as_dict(run)
        saved = tracker.read_tracker(Path(spec["checkpoint_dir"])) or 0
        attempts = [attempt for of_segment in files.values() for attempt in of_segment]
        merged = metrics.merge([attempt.steps[step] for step in sorted(attempt.steps)] for attempt in attempts)
        rewards, losses = _curve(merged, metrics.REWARD), _curve(merged, metrics.SFT_LOSS)
        # The last segment has been marked, and the marks are made before the jobs are cancelled.
        cancelled = bool(chain) and run.segment(chain[-1].segment).cancel_file.exists()
        # A segment that has not begun may be one that goes back to an older step: what is saved is then not the end.
        waiting = (segment for segment in segments if not segment.over and not segment.attempts)
        goes_back = any(run.segment(segment.segment).request_file.exists() for segment in waiting)
        past = [attempt.outcome for attempt in attempts if attempt.outcome]
        state, reason = state_of(segments, others, past, saved, spec["total_steps"], cancelled, goes_back, no_answer)
        if state == "waiting" and "JobHeld" in reason:  # by its user, or by root
            reason = self._why_held(segments) or reason
        return RunState(
            run=run.name,
            directory=str(run.path),
            state=state,
            reason=reason,
            saved_step=saved,
            total_steps=spec["total_steps"],
            last_reward=rewards[max(rewards)] if rewards else None,
            rewards=rewards,
            losses=losses,
            segments=[one for one in segments if not (one.spare and one.over and not one.attempts and _over(state))],
            other_jobs=others,
            progress=progress_of(merged, attempts, spec["total_steps"], spec.get("segment_steps")),
            origin=read_object(run.origin_file),
            proof=_proof(spec, merged),
            excluded_nodes=[asdict(one) for one in exclusions.active(run, time.time())],
        )

    def _why_held(self, segments: Sequence[SegmentState]) -> str | None:
        """What the batch host that held them wrote into Slurm, where it could write nothing else."""
        held = next(segment for segment in segments if not segment.over)
        try:
            return self._slurm.comment(held.job_id)
        except UserError:
            return None

    def _not_submitted(self, link: ChainLink) -> list[str]:
        """Why an earlier segment could not submit this one."""
        why = [] if link.job_id else tail(self._run.segment(link.segment).not_submitted_file, 1)
        return [f"{_LAST_TRY}{line}" for line in why]

    def _container_starts(self, link: ChainLink, latest: AttemptReader | None) -> float | None:
        """Since when its containers are being started, where no agent has said a word since."""
        began = self._run.segment(link.segment).container_began()
        heard = [mark.time for mark in latest.marks] if latest else []
        return began if began is not None and began > max(heard, default=0.0) else None

    def _segment(
        self, link: ChainLink, job: JobState | None, files: Mapping[int, Sequence[AttemptReader]]
    ) -> SegmentState:
        attempts = files.get(link.segment, [])
        latest = attempts[-1] if attempts else None
        course = latest.course if latest else None
        done = latest.outcome if latest else None
        last = latest.last if latest else None
        silent = not attempts and (job is None or job.state == "FAILED")
        said = _batch_script_said(self._run.segment(link.segment)) if silent else []
        state = job or JobState(remembered_state(done, bool(said)), "Slurm no longer knows the job")
        if not link.job_id:
            state = JobState(NOT_SUBMITTED, "")
        marks = latest.marks if latest else []
        now = marks[-1] if marks and state.state == "RUNNING" and not done else None
        if state.state == "RUNNING" and (began := self._container_starts(link, latest)):
            now = Mark(phases.CONTAINER_START, began)
        others = [other.marks for of_segment in files.values() for other in of_segment if other is not latest]
        return SegmentState(
            segment=link.segment,
            job_id=link.job_id,
            state=state.state,
            reason=state.reason,
            attempts=len(attempts),
            start_step=course.start if course else done.start if done else None,
            target_step=course.target if course else done.target if done else None,
            end_step=done.reached if done else None,
            last_step=last.step if last else None,
            reward=last.data.get(metrics.REWARD) if last else None,
            step_s=last.data.get(metrics.STEP_TIME) if last else None,
            end=done.end if done else None,
            loss=last.data.get(metrics.SFT_LOSS) if last else None,
            evidence=done.evidence if done else said,
            changes=read_object(self._run.segment(link.segment).changes_file),
            seconds=phases.seconds(marks, done.ended if done else None),
            phase=now.phase if now else None,
            phase_s=round(max(0.0, time.time() - now.time), 1) if now else None,
            usual_s=self._usual.seconds(now.phase, others) if now else None,
            notes=[*_starts_again(attempts), *(_notes(latest) if latest else []), *self._not_submitted(link)],
            spare=link.spare,
        )


def read_state(run: RunDir, slurm: Slurm) -> RunState:
    """The state of a run at one moment."""
    return StateReader(run, slurm).read()


def _notes(attempt: AttemptReader) -> list[str]:
    """What was done to the checkpoints before, and what the trainer's log told."""
    if attempt.outcome:
        return attempt.outcome.notes
    return [*(attempt.course.actions if attempt.course else []), *attempt.notes]


def _starts_again(attempts: Sequence[AttemptReader]) -> Iterator[str]:
    """Why the segment has more than one attempt, and how long it took until it trained again."""
    for number, (before, after) in enumerate(pairwise(attempts)):
        if (ended := before.outcome) is None:
            continue
        line = f"attempt {number} ended at step {ended.reached}: {ended.end}"
        line += "".join(f" ({evidence})" for evidence in ended.evidence[:1])
        trains = [mark.time for mark in after.marks if mark.phase == phases.STEPS]
        fault = [mark.time for mark in before.marks if mark.phase == phases.END] or [ended.ended]
        yield f"{line}; trained again {trains[0] - fault[-1]:.0f} s later" if trains else line


def _batch_script_said(segment: SegmentDir) -> list[str]:
    """Why the batch script started nothing: the secrets file had another mode by then."""
    begins = f"segment {segment.number}: "
    return [line.removeprefix(begins) for line in tail(segment.log, 20) if line.endswith(_STARTED_NOTHING)]


def remembered_state(done: Outcome | None, refused: bool = False) -> str:
    """What Slurm would say of a job it has forgotten, told from what its last attempt left.

    `refused`: its batch script started nothing, and said why.
    """
    if done is None:
        return "FAILED" if refused else "CANCELLED"  # it left nothing: it never ran
    return "FAILED" if done.next == outcome.STOP else "COMPLETED"


def _curve(steps: Sequence[metrics.StepMetrics], name: str) -> dict[int, float]:
    """Step -> metric, where it is a number."""
    found = {step.step: step.data.get(name) for step in steps}
    return {step: value for step, value in found.items() if value is not None and math.isfinite(value)}


def _proof(spec: Mapping[str, Any], merged: Sequence[metrics.StepMetrics]) -> str | None:
    """Whether a run that is to prove a site does; None for others, and for recipes that generate nothing."""
    asked = spec.get("gates") or {}
    if spec.get("launcher") != "ray" or not (asked.get(gates.AGREEMENT) or {}).get("proves"):
        return None
    return gates.proof(asked, merged, spec["total_steps"])


def _over(state: str) -> bool:
    return state not in ("waiting", "running", "unknown")


def state_of(
    segments: list[SegmentState],
    others: Mapping[str, str],
    past: list[Outcome],
    saved: int,
    total: int,
    cancelled: bool,
    goes_back: bool,
    no_answer: str | None,
) -> tuple[str, str]:
    """(state, reason) of a run, from its segments and what else is known of it (see RunState)."""
    live = [segment for segment in segments if not segment.over and segment.state != "UNKNOWN"]
    running = any(state in ("RUNNING", "COMPLETING") for state in (*(one.state for one in live), *others.values()))
    if saved >= total and not goes_back and not running:
        return "finished", f"all {total} steps are saved"
    if running:
        return "running", ""
    if live or others:
        return "waiting", in_words(live[0].reason) if live else ""
    if cancelled:
        return "cancelled", f"by the user; step {saved} of {total} is saved"
    if past and past[-1].next == outcome.STOP:
        return "stopped", past[-1].reason
    ran = [segment for segment in segments if segment.state not in ("CANCELLED", NOT_SUBMITTED)]
    if ran and not ran[-1].attempts and ran[-1].evidence:
        return "stopped", ran[-1].evidence[0]
    if no_answer is not None:
        return "unknown", no_answer
    submitted = [segment.segment for segment in segments if segment.state != NOT_SUBMITTED]
    never = [one for one in segments if not one.spare and one.segment > max(submitted, default=0)]
    if never or not segments:
        those = f"{len(never)} segment{'s were' if len(never) > 1 else ' was'}" if submitted else "its segments were"
        why = "".join(f": {note.removeprefix(_LAST_TRY)}" for one in never[:1] for note in one.notes)
        return "incomplete", f"step {saved} of {total} is saved; {those} never submitted{why}"
    return "incomplete", f"step {saved} of {total} is saved and no segment is left"
