"""What one attempt did, and what the chain does next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4kit.run import ends
from dsv4kit.run.files import read_json, write_json, write_text

CONTINUE = "continue"
FINISHED = "finished"
STOP = "stop"

# In the directory of a segment: from which attempt on its user has cancelled it.
CANCEL_MARK = "cancelled.json"


@dataclass(frozen=True)
class Outcome:
    """`outcome.json` of an attempt. Steps are absolute; `reached` is the last step a complete checkpoint holds."""

    segment: int
    attempt: int
    job_id: str
    start: int
    target: int
    reached: int
    end: str
    verdict: str
    reason: str
    evidence: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    excluded_nodes: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    exit_status: int | None = None
    started: float = 0.0
    ended: float = 0.0

    @property
    def advanced(self) -> bool:
        """Whether the attempt added a checkpoint."""
        return self.reached > self.start


def decide(
    end: str, *, reached: int, total: int, start: int, history: Sequence[Outcome], limit: int
) -> tuple[str, str]:
    """(verdict, reason). Progress is what counts; `limit` attempts in a row without any stop the chain.

    One that its user cancelled, or that found another job of the run at work, had no chance to make progress, and does
    not count.
    """
    if end == ends.ANOTHER_LIVE:
        return CONTINUE, "the other job goes on"
    if reached >= total:
        return FINISHED, f"step {reached} of {total} is saved"
    if reached > start:
        return CONTINUE, f"step {reached} of {total} is saved"
    if end in ends.FATAL:
        return STOP, f"{end}: trying again cannot help"
    fruitless = 1
    for earlier in reversed(history):
        if earlier.advanced:
            break
        fruitless += earlier.end not in ends.EXCUSED
    if fruitless >= limit:
        return STOP, f"{fruitless} attempts in a row without progress, at step {reached} of {total}"
    return CONTINUE, f"no progress ({end}), attempt {fruitless} of {limit} allowed in a row"


def history(run_dir: Path) -> list[Outcome]:
    """Outcomes of all attempts so far, oldest first."""
    found = run_dir.glob("segments/[0-9]*/attempt-[0-9]*/outcome.json")
    attempts = sorted((path for path in found if path.parent.name[8:].isdecimal()), key=_order)
    return [outcome for path in attempts if (outcome := load(path))]


def load(path: Path) -> Outcome | None:
    """One outcome; None while there is none. Keys of other versions of the kit are ignored.

    An attempt that was cancelled before it reached its target ended by that, whatever its nodes saw of it.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        return None
    known = {item.name for item in dataclasses.fields(Outcome)}
    try:
        found = Outcome(**{key: value for key, value in content.items() if key in known})
    except TypeError:  # a key it cannot do without is missing
        return None
    if found.end == ends.COMPLETED or found.verdict == FINISHED or not is_cancelled(path.parents[1], found.attempt):
        return found
    reason = f"by the user, at step {found.reached}"
    return dataclasses.replace(found, end=ends.CANCELLED, verdict=STOP, reason=reason, evidence=[])


def is_cancelled(segment_dir: Path, attempt: int) -> bool:
    """Whether the user cancelled the segment before or in that attempt."""
    mark = read_json(segment_dir / CANCEL_MARK)
    first = mark.get("from_attempt") if isinstance(mark, dict) else None
    return isinstance(first, int) and attempt >= first


def save(outcome: Outcome, segment_dir: Path) -> None:
    """Writes `outcome.json` of the attempt."""
    write_json(segment_dir / f"attempt-{outcome.attempt}" / "outcome.json", dataclasses.asdict(outcome))


def announce(outcome: Outcome, segment_dir: Path) -> None:
    """Writes the two files the batch script reads: `excluded_nodes`, and last `verdict`."""
    write_text(segment_dir / "excluded_nodes", ",".join(outcome.excluded_nodes))
    write_text(segment_dir / "verdict", outcome.verdict + "\n")


def _order(path: Path) -> tuple[int, int]:
    return int(path.parent.parent.name), int(path.parent.name.removeprefix("attempt-"))
