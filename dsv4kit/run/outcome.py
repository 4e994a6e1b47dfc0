"""What one attempt did, and what the chain does next.

Standard library only; frozen into every run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4kit.run import ends
from dsv4kit.run.directory import AttemptDir, RunDir, SegmentDir
from dsv4kit.run.files import read_object, write_json, write_text

CONTINUE = "continue"
FINISHED = "finished"
STOP = "stop"
# How many more attempts in a row may come to nothing where Slurm or a node was the cause.
OUTSIDE_FACTOR = 5

# What `Outcome.next` is called in `outcome.json`, as the frozen kits of older runs write it.
_NEXT_KEY = "verdict"


@dataclass(frozen=True)
class Outcome:
    """`outcome.json` of an attempt. Steps are absolute; `reached` is the last step a complete checkpoint holds.

    `next` is what the chain does: CONTINUE, FINISHED or STOP. `again`: the same job makes another attempt first.
    """

    segment: int
    attempt: int
    job_id: str
    start: int
    target: int
    reached: int
    end: str
    next: str
    reason: str
    evidence: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    excluded_nodes: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    exit_status: int | None = None
    again: bool = False
    started: float = 0.0
    ended: float = 0.0

    @property
    def advanced(self) -> bool:
        """Whether the attempt added a checkpoint."""
        return self.reached > self.start


def decide(
    end: str, *, reached: int, total: int, start: int, history: Sequence[Outcome], limit: int
) -> tuple[str, str]:
    """(next, reason). Progress is what counts; `limit` attempts in a row without any stop the chain.

    An attempt that Slurm ended, or that lost a node, is counted apart and has OUTSIDE_FACTOR times that limit.
    One that its user cancelled, or that found another job of the run at work, had no chance to make progress, and does
    not count.
    """
    if end == ends.ANOTHER_LIVE:
        return CONTINUE, "the other job goes on"
    if reached >= total:
        return FINISHED, f"step {reached} of {total} is saved"
    if end == ends.GATE:
        return STOP, f"{end}, at step {reached} of {total}"
    if reached > start:
        return CONTINUE, f"step {reached} of {total} is saved"
    if end in ends.FATAL:
        return STOP, f"{end}: trying again cannot help"
    row = [end]
    for earlier in reversed(history):
        if earlier.advanced:
            break
        row.append(earlier.end)
    # What Slurm or a node did says less about the run than what the run did by itself.
    outside = end in ends.FROM_OUTSIDE
    allowed = limit * OUTSIDE_FACTOR if outside else limit
    counted = sum(one in ends.FROM_OUTSIDE if outside else one not in ends.EXCUSED | ends.FROM_OUTSIDE for one in row)
    if counted >= allowed:
        return STOP, f"{counted} attempts in a row without progress, at step {reached} of {total}"
    return CONTINUE, f"no progress ({end}), attempt {counted} of {allowed} allowed in a row"


def history(run: RunDir) -> list[Outcome]:
    """Outcomes of all attempts so far, oldest first."""
    return [outcome for attempt in run.attempts() if (outcome := load(attempt))]


def since_resume(run: RunDir) -> list[Outcome]:
    """Outcomes since the last `resume`, oldest first: what came before it, its user has looked at."""
    begins = max((segment.number for segment in run.segments() if segment.resumed_file.exists()), default=0)
    return [outcome for outcome in history(run) if outcome.segment >= begins]


def load(attempt: AttemptDir) -> Outcome | None:
    """One outcome; None while there is none. Keys of other versions of the kit are ignored.

    An attempt that was cancelled before it reached its target ended by that, whatever its nodes saw of it.
    """
    content = read_object(attempt.outcome_file)
    if _NEXT_KEY in content:
        content["next"] = content.pop(_NEXT_KEY)
    known = {item.name for item in dataclasses.fields(Outcome)}
    try:
        found = Outcome(**{key: value for key, value in content.items() if key in known})
    except TypeError:  # a key it cannot do without is missing
        return None
    if found.end == ends.COMPLETED or found.next == FINISHED or not is_cancelled(attempt):
        return found
    reason = f"by the user, at step {found.reached}"
    return dataclasses.replace(found, end=ends.CANCELLED, next=STOP, reason=reason, evidence=[])


def save(outcome: Outcome, segment: SegmentDir) -> None:
    """Writes `outcome.json` of the attempt."""
    content = {_NEXT_KEY if key == "next" else key: value for key, value in dataclasses.asdict(outcome).items()}
    write_json(segment.attempt(outcome.attempt).outcome_file, content)


def announce(outcome: Outcome, segment: SegmentDir) -> None:
    """Writes the two files the batch script reads: the nodes to avoid, and last what is next."""
    write_text(segment.excluded_file, ",".join(outcome.excluded_nodes))
    announce_next(outcome.next, segment)


def announce_next(following: str, segment: SegmentDir) -> None:
    """Writes what the batch script does next: CONTINUE, FINISHED or STOP."""
    write_text(segment.next_file, following + "\n")


def mark_cancelled(segment: SegmentDir, from_attempt: int) -> None:
    """Says that the user cancelled the segment in that attempt or before it."""
    write_json(segment.cancel_file, {"from_attempt": from_attempt})


def is_cancelled(attempt: AttemptDir) -> bool:
    """Whether the user cancelled the segment before or in that attempt."""
    first = read_object(attempt.segment.cancel_file).get("from_attempt")
    return isinstance(first, int) and attempt.number >= first
