"""How an attempt can end, and how to tell from the driver's log which it was.

The exit status says little: verl exits with 1 on a signal, a crash and a typing error alike, and with 0 when it ran out
of epochs without saving. So each class rests on evidence: the log line that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dsv4kit.run.driver_log import clean

COMPLETED = "completed"
NOTHING_TO_DO = "nothing to do"
STOPPED = "stopped at a step boundary"
STOPPED_SHORT = "stopped short"
OUT_OF_GPU_MEMORY = "out of GPU memory"
OUT_OF_HOST_MEMORY = "out of host memory"
STORAGE_FULL = "storage full"
NODE_LOST = "node lost"
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
UNKNOWN = "unknown"

# No fault of the attempt's own: it says nothing about whether the next one can make progress.
EXCUSED = frozenset({CANCELLED, ANOTHER_LIVE})
# Trying again cannot help with these.
FATAL = frozenset({CONFIGURATION, CHECKPOINT, WRONG_STEP})

# First match wins, so causes stand before the symptoms they bring about (a full disk also loses actors). verl warns of
# every optional package it does not find, quoting the exception: only `Name: text`, as Python ends a traceback, counts.
_SIGNS = (
    (STORAGE_FULL, r"No space left on device|Disk quota exceeded|OutOfDiskError"),
    (OUT_OF_GPU_MEMORY, r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory"),
    (OUT_OF_HOST_MEMORY, r"OutOfMemoryError: Task was killed|ray\.exceptions\.OutOfMemoryError|\bMemoryError\b"),
    (OUT_OF_HOST_MEMORY, r"Cannot allocate memory"),
    (CONFIGURATION, r"Could not override|hydra\.errors\.\w+: |omegaconf\.errors\.\w+: |unexpected keyword argument"),
    (CONFIGURATION, r"(ModuleNotFoundError|HFValidationError): |not supported and SGLang also not Found"),
    (NETWORK, r"NCCL error|ncclSystemError|ncclRemoteError|Gloo connectFullMesh failed|Connection timed out"),
    (NODE_LOST, r"Owner's node has crashed|node.*has been marked dead|NodeDiedError|raylet.*died"),
    (NODE_LOST, r"ActorDiedError|The actor died|ActorUnavailableError"),
)
_PATTERNS = [(name, re.compile(pattern)) for name, pattern in _SIGNS]
_EXCEPTION = re.compile(r"\b\w*(Error|Exception): ")
_WIDTH = 300


@dataclass(frozen=True)
class Evidence:
    """A class of end with the lines that show it."""

    end: str
    lines: list[str]


def classify(lines: Iterable[str]) -> Evidence:
    """The class the driver's log speaks for, with up to three lines of it.

    Where nothing is recognised, the class is `unknown` and the lines are the first exceptions, else the last lines.
    """
    found: dict[str, list[str]] = {}
    exceptions: list[str] = []
    last: list[str] = []
    for line in lines:
        text = clean(line)[:_WIDTH]
        if not text or "Warning: " in text:
            continue
        last = [*last[-2:], text]
        if _EXCEPTION.search(text) and text not in exceptions:
            exceptions.append(text)
        for name, pattern in _PATTERNS:
            if pattern.search(text):
                found.setdefault(name, []).append(text)
                break
    for name, _ in _SIGNS:
        if name in found:
            return Evidence(name, found[name][:3])
    return Evidence(UNKNOWN, exceptions[:3] or last)
