"""What a fault cost: from the end of the training that it broke to the next finished step.

Standard library only; used on the compute nodes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from dsv4kit.run import ends, metrics, outcome, phases
from dsv4kit.run.directory import AttemptDir
from dsv4kit.run.phases import Mark

_NO_FAULT = frozenset({ends.COMPLETED, ends.NOTHING_TO_DO, ends.STOPPED, ends.CANCELLED, ends.ANOTHER_LIVE})


def told(before: AttemptDir, marks: Sequence[Mark], start: int, now: float) -> str | None:
    """One line once the first step after a fault is done; None where `before`, the attempt before, ended well.

    `marks` are those of the attempt that goes on, `start` its first step less one, `now` seconds since the epoch. The
    fault is dated by the moment its attempt began to end its processes.
    """
    was = outcome.load(before)
    if was is None or was.end in _NO_FAULT:
        return None
    lines = before.phases_file.read_bytes().splitlines() if before.phases_file.exists() else []
    ended = [mark.time for mark in phases.parse(lines)[0] if mark.phase == phases.END]
    fault = ended[-1] if ended else was.ended
    if not fault:
        return None
    began = next((mark.time for mark in marks if mark.phase == phases.STEPS), now)
    lost = max(0, (metrics.last_step(before.metrics_file) or start) - start)
    return (
        f"fault ({was.end}) at {time.strftime('%H:%M:%S', time.localtime(fault))}, training again after"
        f" {began - fault:.0f} s, next step after {now - fault:.0f} s, {lost} step{'' if lost == 1 else 's'} lost"
    )
