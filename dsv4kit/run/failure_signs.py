"""What a driver's log and exit status say about a failure: its class, the lines that show it, and where they come from.

The exit status alone says little: verl exits with 1 on a crash and on a typing error alike, and with 0 when it ran
out of epochs without saving. So each class rests on a line of the log. The log also holds text that a model wrote, and
everything that happened before: only lines after the last finished step count, a model's text never does, and once a
step is done no text alone makes a failure one that trying again cannot help.
"""

from __future__ import annotations

import json
import re
import signal
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsv4kit.run import ends
from dsv4kit.run.driver_log import TRAINED_STEP, Source, clean, is_trainers, source_of
from dsv4kit.run.ends import Evidence

# verl warns of every optional package it does not find, quoting the exception: only `Name: text`, as Python ends a
# traceback, counts in the patterns.
SIGNATURES: list[dict[str, str]] = json.loads(Path(__file__).with_name("signatures.json").read_text(encoding="utf-8"))[
    "signatures"
]
"""The table, in its order: `end`, `pattern`, `source`, `example`."""
_PATTERNS = [(row["end"], re.compile(row["pattern"], re.IGNORECASE)) for row in SIGNATURES]
_RANK = {name: number for number, (name, _) in reversed(list(enumerate(_PATTERNS)))}
_EXCEPTION = re.compile(r"\b\w*(Error|Exception): ")
# Ray's traceback of what failed elsewhere: ray::WorkerDict.update_actor() (pid=8, ip=10.0.0.3, actor_id=...)
_REMOTE = re.compile(r"ray::(?P<name>[\w.]+)\(?\)? \(pid=(?P<pid>\d+), ip=(?P<ip>[0-9a-f.:]+)")
# torchrun's table of the processes that failed (torch/distributed/elastic/multiprocessing/errors): the first one.
_ROOT_CAUSE = "Root Cause (first observed failure):"
_ROW = re.compile(r"\s*(?P<key>host|rank|exitcode) *: (?P<value>\S+)(?:.*\(pid: (?P<pid>\d+)\))?")
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
    table: dict[str, str] | None = None


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
        if source is None and text.strip() == _ROOT_CAUSE:
            failure.table = {}
        elif failure.table is not None and (row := _ROW.match(text)):
            failure.table.setdefault(row["key"], row["value"])
            if row["pid"]:
                failure.table.setdefault("pid", row["pid"])
        if _EXCEPTION.search(text) and shown not in failure.exceptions:
            failure.exceptions.append(shown)
        for name, pattern in _PATTERNS:
            if pattern.search(text):
                failure.found.setdefault(name, []).append(shown)
                break
    place = [first] if (first := _first_of_table(failure.table) or failure.where) else []
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


def _first_of_table(table: Mapping[str, str] | None) -> str:
    """The first process that failed, as torchrun saw it: its exit status is negative for a signal."""
    if not table or "rank" not in table:
        return ""
    code = table.get("exitcode", "")
    status = int(code) if code.lstrip("-").isdecimal() else None
    ended = f"killed by {killed}" if (killed := signal_name(status)) else f"exit status {code or 'unknown'}"
    host, pid = (table.get(key, "unknown") for key in ("host", "pid"))
    return f"first to fail: rank {table['rank']} on {host}, pid {pid}, {ended}"


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
