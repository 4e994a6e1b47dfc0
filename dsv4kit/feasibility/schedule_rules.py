"""How long a chain of segments may be."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dsv4kit import hints
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
