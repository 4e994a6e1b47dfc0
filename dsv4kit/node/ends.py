"""How an attempt can end, and how to tell from the driver's log which it was.

The exit status says little: verl exits with 1 on a signal, a crash and a typing error alike, and with 0 when it ran out
of epochs without saving. So each class rests on evidence: the log line that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

COMPLETED = "completed"
NOTHING_TO_DO = "nothing to do"
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
TIME_LIMIT = "time limit"
TERMINATED = "terminated by slurm"
LOST = "lost"
UNKNOWN = "unknown"

# Trying again cannot help with these.
FATAL = frozenset({CONFIGURATION, CHECKPOINT, WRONG_STEP})

# First match wins, so causes stand before the symptoms they bring about (a full disk also loses actors).
_SIGNS = (
    (STORAGE_FULL, r"No space left on device|Disk quota exceeded|OutOfDiskError"),
    (OUT_OF_GPU_MEMORY, r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory"),
    (
        OUT_OF_HOST_MEMORY,
        r"OutOfMemoryError: Task was killed|ray\.exceptions\.OutOfMemoryError|Cannot allocate memory|\bMemoryError\b",
    ),
    (
        CONFIGURATION,
        r"Could not override|hydra\.errors\.|omegaconf\.errors\.|unexpected keyword argument|ModuleNotFoundError",
    ),
    (CONFIGURATION, r"is not the path to a directory|not supported and SGLang also not Found|real_train_batch_size"),
    (
        NETWORK,
        r"NCCL error|ncclSystemError|ncclRemoteError|Gloo connectFullMesh failed|Connection timed out|Socket Timeout",
    ),
    (NODE_LOST, r"Owner's node has crashed|node.*has been marked dead|NodeDiedError|raylet.*died"),
    (NODE_LOST, r"ActorDiedError|The actor died|ActorUnavailableError"),
)
_PATTERNS = [(name, re.compile(pattern)) for name, pattern in _SIGNS]


@dataclass(frozen=True)
class Evidence:
    """A class of end with the lines that show it."""

    end: str
    lines: list[str]


def classify(lines: Iterable[str], tail: int = 5) -> Evidence:
    """The class the log speaks for; `unknown` with the last lines where nothing is recognised."""
    found: dict[str, list[str]] = {}
    last: list[str] = []
    for line in lines:
        text = line.rstrip()
        if not text:
            continue
        last = [*last[-(tail - 1) :], text]
        for name, pattern in _PATTERNS:
            if pattern.search(text):
                found.setdefault(name, []).append(text[:500])
                break
    for name, _ in _SIGNS:
        if name in found:
            return Evidence(name, found[name][:3])
    return Evidence(UNKNOWN, [line[:500] for line in last])
