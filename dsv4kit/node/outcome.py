"""What one attempt did, and what the chain does next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4kit.node import ends
from dsv4kit.node.files import read_json, write_json, write_text

CONTINUE = "continue"
FINISHED = "finished"
STOP = "stop"


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
    """(verdict, reason). Progress is what counts; `limit` attempts in a row without any stop the chain."""
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
        fruitless += 1
    if fruitless >= limit:
        return STOP, f"{fruitless} attempts in a row without progress, at step {reached} of {total}"
    return CONTINUE, f"no progress ({end}), attempt {fruitless} of {limit} allowed in a row"


def history(run_dir: Path) -> list[Outcome]:
    """Outcomes of all attempts so far, oldest first."""
    found = run_dir.glob("segments/[0-9]*/attempt-[0-9]*/outcome.json")
    attempts = sorted((path for path in found if path.parent.name[8:].isdecimal()), key=_order)
    return [outcome for path in attempts if (outcome := load(path))]


def load(path: Path) -> Outcome | None:
    """One outcome; None while there is none. Keys of other versions of the kit are ignored."""
    content = read_json(path)
    if not isinstance(content, dict):
        return None
    known = {item.name for item in dataclasses.fields(Outcome)}
    try:
        return Outcome(**{key: value for key, value in content.items() if key in known})
    except TypeError:  # a key it cannot do without is missing
        return None


def save(outcome: Outcome, segment_dir: Path) -> None:
    """Writes `outcome.json` of the attempt."""
    write_json(segment_dir / f"attempt-{outcome.attempt}" / "outcome.json", dataclasses.asdict(outcome))


def announce(outcome: Outcome, segment_dir: Path) -> None:
    """Writes the two files the batch script reads: `excluded_nodes`, and last `verdict`."""
    write_text(segment_dir / "excluded_nodes", ",".join(outcome.excluded_nodes))
    write_text(segment_dir / "verdict", outcome.verdict + "\n")


def _order(path: Path) -> tuple[int, int]:
    return int(path.parent.parent.name), int(path.parent.name.removeprefix("attempt-"))
