"""When what began: one JSON line per phase, written by node 0."""

from __future__ import annotations

import time
from pathlib import Path

from dsv4kit.run.files import append_json

BRING_UP = "bring-up"
START = "trainer start"
STEPS = "steps"
END = "end"


class Phases:
    """Appends `{"phase": ..., "time": ...}` lines to a file; a phase lasts until the next one begins."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, phase: str) -> None:
        """Marks the begin of a phase, and so the end of the one before; `time` is seconds since the epoch."""
        append_json(self._path, {"phase": phase, "time": round(time.time(), 3)})
