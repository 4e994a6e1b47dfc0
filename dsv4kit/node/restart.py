"""Whether a job whose attempt failed starts its trainer again: cheaper than a wait in the queue for as many nodes."""

from __future__ import annotations

from collections.abc import Mapping

from dsv4kit.run import ends, outcome, phases

# Faults that another start on the same nodes can get past. Not among them: what waits for a person (configuration, a
# full disk) and what Slurm decided.
_WORTH_IT = frozenset(
    {
        *(ends.OUT_OF_GPU_MEMORY, ends.OUT_OF_HOST_MEMORY, ends.STORAGE, ends.KERNEL_FAULT, ends.NOT_A_NUMBER),
        *(ends.PROCESS_DIED, ends.KILLED, ends.COLLECTIVE_TIMEOUT, ends.NETWORK, ends.STALLED, ends.PART_ENDED),
        *(ends.STOPPED_SHORT, ends.UNKNOWN),
    }
)


def is_due(result: outcome.Outcome, avoided: bool, restarts: int, limit: int, left_s: float, needed_s: float) -> bool:
    """Whether this job makes another attempt.

    `avoided`: a node is blamed, and only another job can leave it out. `restarts`: those made so far, of `limit`.
    `left_s`: until the time limit; `needed_s`: for a start, a step and a save.
    """
    wanted = result.next == outcome.CONTINUE and result.end in _WORTH_IT and result.reached < result.target
    return wanted and not avoided and restarts < limit and left_s > needed_s


def needed_s(spent_s: Mapping[str, float], steps: int) -> float:
    """Seconds until the next attempt has saved a step, judged by the last one: what it spent per phase, and its steps.

    An attempt that failed before its first step tells no more than how long it took so far.
    """
    other = (phases.STEPS, phases.SAVE, phases.END, *phases.OF_CONTAINER)
    start = sum(seconds for phase, seconds in spent_s.items() if phase not in other)
    return start + (spent_s.get(phases.STEPS, 0.0) + spent_s.get(phases.SAVE, 0.0)) / max(steps, 1)
