"""How long a chain of segments may be, and how short a segment."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dsv4kit import hints
from dsv4kit.config import time_limit
from dsv4kit.feasibility.case import Case, Refusal

# Clusters limit the jobs one may have in the queue, often to a few hundred.
MOST_SEGMENTS = 1000


def segments(case: Case) -> Iterator[Refusal]:
    """The whole chain is submitted at once, unless the site or the user limits it."""
    schedule = case.settings.schedule
    count = math.ceil((schedule.steps - case.first_step) / schedule.segment_steps)
    if count > MOST_SEGMENTS and case.site.slurm.chain is None:
        most = case.first_step + MOST_SEGMENTS * schedule.segment_steps
        yield case.refusal(
            "schedule.steps",
            schedule.steps,
            f"{count} segments of {schedule.segment_steps} steps; at most {MOST_SEGMENTS} jobs are submitted at once",
            f"STEPS={most} is the most now, `{hints.command('resume')}` goes on from there; CHAIN=N queues N at a time",
        )


def time(case: Case) -> Iterator[Refusal]:
    """`slurm.grace_s` before its time limit a segment is told to save and end."""
    given, grace_s = case.settings.schedule.time, case.site.slurm.grace_s
    if (limit_s := time_limit.seconds(given)) <= grace_s:
        why = f"{limit_s} s, and a segment is told to end {grace_s} s before its limit (slurm.grace_s of the site)"
        yield case.refusal(
            "schedule.time", given, f"{why}: it would never make a step", f"more than {grace_s} s would do"
        )
