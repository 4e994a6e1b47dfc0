"""What a driver's log and exit status say about a failure: its class, the lines that show it, and where they come from.

The exit status alone says little: verl exits with 1 on a crash and on a typing error alike, and with 0 when it ran
out of epochs without saving. So each class rests on a line of the log. The log also holds text that a model wrote, and
everything that happened before: only lines after the last finished step count, a model's text never does, and once a
step is done no text alone makes a failure one that trying again cannot help.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dsv4kit.run import ends
from dsv4kit.run.driver_log import TRAINED_STEP, Source, clean, is_trainers, source_of
from dsv4kit.run.ends import Evidence

# First match wins, so causes stand before the symptoms they bring about (a full disk also loses actors). verl warns of
# every optional package it does not find, quoting the exception: only `Name: text`, as Python ends a traceback, counts.
_SIGNS = (
    (ends.STORAGE_FULL, r"No space left on device|Disk quota exceeded|OutOfDiskError|\[Errno (28|122)\]"),
    (ends.STORAGE, r"Input/output error|Stale (NFS )?file handle|Read-only file system|\[Errno (5|30|116)\]"),
    (ends.STORAGE, r"Transport endpoint is not connected|Cannot send after transport endpoint shutdown"),
    (ends.OUT_OF_GPU_MEMORY, r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory"),
    (ends.OUT_OF_GPU_MEMORY, r"No available memory for the cache blocks|Free memory on device .* is less than desired"),
    (ends.OUT_OF_HOST_MEMORY, r"OutOfMemoryError: Task was killed|ray\.exceptions\.OutOfMemoryError|\bMemoryError\b"),
    (ends.OUT_OF_HOST_MEMORY, r"Cannot allocate memory|oom[_-]kill|Out of memory: Killed process"),
    (ends.GPU_FAULT, r"uncorrectable (ECC|NVLink) error|GPU has fallen off the bus|\bXid\b|CUDA error: unknown error"),
    (ends.GPU_FAULT, r"CUDA error: (hardware stack|device-side fault|an uncorrectable)|NVML: Unknown Error"),
    (ends.GPU_FAULT, r"(no CUDA-capable device is detected|CUDA driver initialization failed)"),
    (
        ends.KERNEL_FAULT,
        r"illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS|"
        r"CUDA error: (misaligned address|an illegal instruction|unspecified launch)",
    ),
    (ends.KERNEL_FAULT, r"device-side assert triggered|CUBLAS_STATUS_|CUDNN_STATUS_|no kernel image is available"),
    (
        ends.CONFIGURATION,
        r"Could not override|hydra\.errors\.\w+: |omegaconf\.errors\.\w+: |unexpected keyword argument",
    ),
    (ends.CONFIGURATION, r"(ModuleNotFoundError|HFValidationError): |not supported and SGLang also not Found"),
    (ends.CONFIGURATION, r"ImportError: (cannot import name|.*cannot open shared object file|.*undefined symbol)"),
    (ends.CONFIGURATION, r"OSError: .*cannot open shared object file|OSError: .*undefined symbol"),
    (ends.CONFIGURATION, r"DEEPGEMM_MXFP4\b.*SM90|Invalid experimental attention variant"),
    (ends.CONFIGURATION, r"PermissionError: |\[Errno 13\]"),
    (
        ends.NOT_A_NUMBER,
        r"(loss|grad(ient)?(_norm)?|reward|logits?|probs?|tensor)\b.{0,40}\b(nan|inf)\b|found (NaN|Inf) in",
    ),
    (ends.NOT_A_NUMBER, r"probability tensor contains either `inf`, `nan`"),
    (ends.COLLECTIVE_TIMEOUT, r"Watchdog caught collective operation timeout|Timeout waiting for .*collective"),
    (ends.COLLECTIVE_TIMEOUT, r"Timed out waiting \d+ms for (recv|send)|collective operation timeout: WorkNCCL"),
    (ends.NETWORK, r"NCCL error|ncclSystemError|ncclRemoteError|ncclInternalError|Gloo connectFullMesh failed"),
    (ends.NETWORK, r"Connection (timed out|reset by peer|refused)|Network is unreachable|No route to host|Broken pipe"),
    (ends.NETWORK, r"RendezvousConnectionError|DistNetworkError|DistStoreError|IBV_WC_|ibv_poll_cq"),
    (
        ends.NODE_LOST,
        r"Owner's node has crashed|node.*has been marked dead|NodeDiedError|raylet.*died|its node has died",
    ),
    (ends.PROCESS_DIED, r"ActorDiedError|The actor died|ActorUnavailableError|WorkerCrashedError|EngineDeadError"),
    (ends.PROCESS_DIED, r"ChildFailedError|exitcode *: *-?\d+"),
)
_PATTERNS = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _SIGNS]
_RANK = {name: number for number, name in reversed(list(enumerate(name for name, _ in _SIGNS)))}
_EXCEPTION = re.compile(r"\b\w*(Error|Exception): ")
# Ray's traceback of what failed elsewhere: ray::WorkerDict.update_actor() (pid=8, ip=10.0.0.3, actor_id=...)
_REMOTE = re.compile(r"ray::(?P<name>[\w.]+)\(?\)? \(pid=(?P<pid>\d+), ip=(?P<ip>[0-9a-f.:]+)")
# verl's reward workers print samples: `[prompt]`, `[response]`, `[ground_truth]`, `[score]` and the model's text.
_SAMPLE = re.compile(r"\[(prompt|response)\]")
_SAMPLE_END = re.compile(r"\[score\]|\[ground_truth\]")
# A traceback through Ray, vLLM and Megatron with every rank's copy of it is a few thousand lines.
_LAST_LINES = 5000
_WIDTH = 300
_SHOWN = 3


@dataclass
class _Failure:
    """What was seen since the last finished step."""

    found: dict[str, list[str]] = field(default_factory=dict)
    exceptions: list[str] = field(default_factory=list)
    where: str = ""


def classify(lines: Iterable[str], exit_status: int | None = None, hosts: Mapping[str, str] | None = None) -> Evidence:
    """The class that the log and the exit status speak for, with up to three lines of it, and the signal if any.

    `exit_status` is the driver's, negative for a signal (as subprocess has it). `hosts` maps addresses to node names.
    Where nothing is recognised the class is `unknown`, and the lines are the first exceptions, else the last lines.
    """
    trained, kept = _after_the_last_step(lines)
    failure, last = _Failure(), deque[str](maxlen=_SHOWN)
    for source, text in kept:
        if not text or "Warning: " in text:
            continue
        shown = _with_place(text, source, hosts or {})
        last.append(shown)
        failure.where = failure.where or _remote_place(text, hosts or {})
        if _EXCEPTION.search(text) and shown not in failure.exceptions:
            failure.exceptions.append(shown)
        for name, pattern in _PATTERNS:
            if pattern.search(text):
                failure.found.setdefault(name, []).append(shown)
                break
    place = [failure.where] if failure.where else []
    killed = signal_name(exit_status)
    note = [f"the driver was killed by {killed}"] if killed else []
    for name in sorted(failure.found, key=_RANK.__getitem__):
        if name in ends.FATAL and (trained or killed):
            continue
        return Evidence(name, [*failure.found[name][: _SHOWN - len(place)], *place, *note])
    if killed:
        return Evidence(ends.KILLED, [*note, *last])
    status = [] if exit_status in (None, 0) else [f"the driver ended with exit status {exit_status}"]
    return Evidence(ends.UNKNOWN, [*(failure.exceptions[:_SHOWN] or last), *place, *status])


def signal_name(exit_status: int | None) -> str | None:
    """`SIGKILL (9)` for the exit status of a process that a signal ended, also as a shell or container passes it on."""
    if exit_status is None:
        return None
    number = -exit_status if exit_status < 0 else exit_status - 128
    if number <= 0 or (exit_status > 0 and number not in (6, 7, 8, 9, 11, 15)):
        return None
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


def _after_the_last_step(lines: Iterable[str]) -> tuple[bool, list[tuple[Source | None, str]]]:
    """Whether a step was finished, and the lines after the last one, without the samples that verl prints."""
    trained, kept = False, deque[tuple[Source | None, str]](maxlen=_LAST_LINES)
    printing: set[Source | None] = set()
    samplers: set[Source] = set()
    for line in lines:
        source, text = source_of(line), clean(line)[:_WIDTH]
        driver = is_trainers(source)
        if _SAMPLE.match(text):
            if source and not driver:
                samplers.add(source)
            printing.add(source)
        elif source in printing and _SAMPLE_END.match(text):
            printing.discard(source)
            continue
        if source in printing or source in samplers:
            continue
        if driver and TRAINED_STEP.match(text):
            trained = True
            kept.clear()
            continue
        kept.append((source, text))
    return trained, list(kept)


def _with_place(text: str, source: Source | None, hosts: Mapping[str, str]) -> str:
    """The line with the process it came from, where that is not the driver itself."""
    if source is None or is_trainers(source):
        return text
    node = hosts.get(source.address, source.address) if source.address else ""
    rank = f", rank {source.rank}" if source.rank is not None else ""
    return f"{source.name} pid {source.pid}{rank}{f' on {node}' if node else ''}: {text}"


def _remote_place(text: str, hosts: Mapping[str, str]) -> str:
    match = _REMOTE.search(text)
    return f"raised in {match['name']} pid {match['pid']} on {hosts.get(match['ip'], match['ip'])}" if match else ""
