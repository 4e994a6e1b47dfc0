"""verl's tracker, `latest_checkpointed_iteration.txt`: the one file that says which checkpoint counts.

verl 0.9.1 writes it last, with a plain open("w") (trainer/ppo/v1/trainer_base.py `_save_checkpoint`): a kill can leave
it empty. Standard library only; used on the compute nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.run.files import write_text

TRACKER_NAME = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Tracker:
    """What the tracker says: a step, or why it says none. `exists` is False only where there is no such file."""

    step: int | None
    problem: str | None = None
    exists: bool = True


def tracker_path(directory: Path) -> Path:
    return directory / TRACKER_NAME


def read_tracker_state(directory: Path) -> Tracker:
    """The tracker with the reason where it names no step. Raises OSError only where the file system fails."""
    try:
        with open(tracker_path(directory), "rb") as file:
            raw = file.read(256)
    except (FileNotFoundError, NotADirectoryError):
        return Tracker(None, f"{TRACKER_NAME} is missing", exists=False)
    except IsADirectoryError:
        return Tracker(None, f"{TRACKER_NAME} is a directory")
    text = raw.strip()
    if not text:
        return Tracker(None, f"{TRACKER_NAME} is empty")
    if not re.fullmatch(rb"[0-9]{1,18}", text) or int(text) == 0:
        return Tracker(None, f"{TRACKER_NAME} holds {raw[:40].decode('ascii', 'replace')!a}, not a step")
    return Tracker(int(text))


def read_tracker(directory: Path) -> int | None:
    """The step that the tracker names (>= 1), or None where it is missing, empty or garbage."""
    return read_tracker_state(directory).step


def write_tracker(directory: Path, step: int) -> None:
    """Make the tracker name `step` (>= 1), atomically, in verl's own format (digits without a newline)."""
    if step < 1:
        raise ValueError(f"a checkpoint step is at least 1, not {step}")
    write_text(tracker_path(directory), str(step))
