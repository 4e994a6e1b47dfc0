"""How an attempt can end. What tells which it was is in failure_signs.py and its table, signatures.json."""

from __future__ import annotations

from dataclasses import dataclass

COMPLETED = "completed"
NOTHING_TO_DO = "nothing to do"
STOPPED = "stopped at a step boundary"
STOPPED_SHORT = "stopped short"
OUT_OF_GPU_MEMORY = "out of GPU memory"
OUT_OF_HOST_MEMORY = "out of host memory"
STORAGE_FULL = "storage full"
# The file system gave an error other than "full".
STORAGE = "storage error"
# The GPU itself, its link or its driver: the node is not to be used.
GPU_FAULT = "GPU fault"
# A kernel did what the GPU refuses, or does not exist for this GPU: mostly software, on any node.
KERNEL_FAULT = "GPU kernel error"
NOT_A_NUMBER = "not a number"
# A gate of the profile stopped it: what the metrics have become (run/gates.py).
GATE = "stopped by a gate"
NODE_LOST = "node lost"
# A process of the trainer ended on its own; what it said, if anything, is another class.
PROCESS_DIED = "a trainer process died"
# The driver, by a signal that was not the kit's.
KILLED = "killed by a signal"
COLLECTIVE_TIMEOUT = "collective timeout"
NETWORK = "network"
CONFIGURATION = "configuration"
CHECKPOINT = "checkpoint"
WRONG_STEP = "resumed at the wrong step"
PREFLIGHT = "preflight"
BRING_UP = "ray bring-up"
STALLED = "stalled"
# The processes of one node ended badly while node 0's went on; the cause is in that node's log.
PART_ENDED = "part ended"
TIME_LIMIT = "time limit"
TERMINATED = "terminated by slurm"
# By the user, with the kit's own verb; no attempt ends so by itself.
CANCELLED = "cancelled"
# Another attempt of the same run holds its lease; this one did nothing.
ANOTHER_LIVE = "another job is live"
LOST = "lost"
# No agent of it left a word: the image, Python or the run directory was not there.
NEVER_STARTED = "never started"
# The agent of node 0 failed by a fault of its own or of the files it reads.
AGENT_FAILED = "agent failed"
UNKNOWN = "unknown"

# No fault of the attempt's own: it says nothing about whether the next one can make progress.
EXCUSED = frozenset({CANCELLED, ANOTHER_LIVE})
# Slurm ended it, or a node was lost: no word about the run itself.
FROM_OUTSIDE = frozenset({TERMINATED, NODE_LOST, LOST})
# Trying again cannot help with these.
FATAL = frozenset({CONFIGURATION, CHECKPOINT, WRONG_STEP})


@dataclass(frozen=True)
class Evidence:
    """A class of end with the lines that show it."""

    end: str
    lines: list[str]
