"""Training metrics: the JSONL that verl's file logger writes, one file per attempt, and the names in it.

A line is `{"step": 3, "data": {"critic/score/mean": 0.04, ...}}`, NaN as null (verl 0.9.1 utils/tracking.py
`FileLogger`). The logger truncates its file at every start, hence one file per attempt; a killed attempt may leave half
a last line. One step can have several lines: SFT logs `val/loss` apart, PPO logs the first validation under the step it
resumed from.

Standard library only; used on the compute nodes and by the report.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Names in verl's V1 trainer; the unit of a value is named where it is not a plain number
GLOBAL_STEP = "training/global_step"
REWARD = "critic/score/mean"
STEP_TIME = "timing_s/step"  # seconds: generation, update, save and weight sync; without validation
GENERATION_TIME = "timing_s/gen"  # seconds
SAVE_TIME = "timing_s/save_checkpoint"  # seconds
WEIGHT_SYNC_TIME = "timing_s/update_weights"  # seconds
UPDATE_TIME = "timing_s/update_actor"  # seconds
TEST_TIME = "timing_s/testing"  # seconds
SFT_LOSS = "train/loss"
PEARSON = "training/rollout_actor_probs_pearson_corr"  # agreement of rollout and actor probabilities; 1 is full
LEARNING_RATES = ("actor/lr", "train/lr")
RESPONSE_LENGTH = "response_length/mean"  # tokens
RESPONSE_LENGTH_MAX = "response_length/max"  # tokens
CLIP_RATIO = "response_length/clip_ratio"
ABORTED_RATIO = "response/aborted_ratio"
SCORES = ("critic/score/min", "critic/score/max")

_VALIDATION = ("val-core/", "val/")
_TRAINED = (GLOBAL_STEP, SFT_LOSS)
# What training goes by; other metrics may well be undefined in a step.
_MUST_BE_NUMBERS = re.compile(r"(^|[/_])(loss|grad_norm)$|^critic/(score|rewards)/mean$")
_LARGEST = sys.float_info.max
_NUMBERS = frozenset((float, int, bool, type(None)))
# Made once: a long run has ten thousand lines of a hundred values.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
_TIMING_MARKS = ("timing", "perf/", "time", "memory", "throughput", "mfu")
_BLOCK_BYTES = 1 << 16
_TAIL_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step; a value of None was NaN or infinite."""

    step: int
    data: Mapping[str, float | None]

    @property
    def trained(self) -> bool:
        """Whether the step was trained here, and not only validated."""
        return any(name in self.data for name in _TRAINED)

    def number(self, name: str) -> float | None:
        """The value where it is a finite number."""
        value = self.data.get(name)
        return value if value is not None and math.isfinite(value) else None

    @property
    def not_numbers(self) -> list[str]:
        """Losses, gradient norms and rewards that are NaN or infinite."""
        return sorted(
            name
            for name, value in self.data.items()
            if _MUST_BE_NUMBERS.search(name) and (value is None or not math.isfinite(value))
        )


def parse_line(line: bytes | str) -> StepMetrics | None:
    """One line of the file, or None where it is not a whole record (half written, garbage, another program's)."""
    try:
        record = _DECODER.decode(line if isinstance(line, str) else line.decode())
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    if not isinstance(record, dict) or not isinstance(record.get("data"), dict):
        return None
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return None
    data = record["data"]
    if not all(map(_is_usual, data.values())):
        data = {name: _usable(value) for name, value in data.items() if type(value) in _NUMBERS}
    return StepMetrics(step, data)


def _is_usual(value: object) -> bool:
    return type(value) is float and -_LARGEST <= value <= _LARGEST


def _usable(value: float | None) -> float | None:
    """None also for what is infinite, and for an integer that no float can hold."""
    return value if value is not None and -_LARGEST <= value <= _LARGEST else None


def read_metrics(path: Path) -> list[StepMetrics]:
    """All steps of one attempt, ascending; lines of the same step put together, the later value winning.

    A file that does not exist (yet) has no steps; lines that are not a whole record are skipped.
    """
    steps: dict[int, dict[str, float | None]] = {}
    try:
        with open(path, "rb") as file:
            for line in file:
                if record := parse_line(line):
                    steps.setdefault(record.step, {}).update(record.data)
    except FileNotFoundError:
        return []
    return [StepMetrics(step, data) for step, data in sorted(steps.items())]


def merge(attempts: Iterable[Sequence[StepMetrics]]) -> list[StepMetrics]:
    """One curve from all attempts, given in the order they ran: a step trained again replaces what was there.

    A record that only validates (the first validation of a resumed attempt) adds to the step instead of replacing it.
    """
    steps: dict[int, StepMetrics] = {}
    for attempt in attempts:
        for record in attempt:
            before = steps.get(record.step)
            if before is None or record.trained:
                steps[record.step] = record
            else:
                steps[record.step] = StepMetrics(record.step, {**before.data, **record.data})
    return [steps[step] for step in sorted(steps)]


def best(curve: Iterable[StepMetrics], among: Collection[int], count: int) -> list[int]:
    """The `count` steps of `among` with the highest mean reward; of equal ones the newer."""
    rewards = [(reward, step.step) for step in curve if (reward := step.data.get(REWARD)) is not None]
    return [step for _, step in sorted((one for one in rewards if one[1] in among), reverse=True)[:count]]


def of_validation(step: StepMetrics) -> dict[str, float]:
    """What a validation measured in that step: GRPO's main results, SFT's loss."""
    names = [name for name in step.data if name.startswith(_VALIDATION)]
    return {name: value for name in names if (value := step.data[name]) is not None}


def last_metrics(path: Path) -> StepMetrics | None:
    """The last step in the file, read from its end (a few blocks, whatever its size); None where there is none."""
    last: StepMetrics | None = None
    try:
        for line in _lines_from_end(path):
            record = parse_line(line)
            if record is None:
                continue
            if last is not None and record.step != last.step:
                break
            last = record if last is None else StepMetrics(last.step, {**record.data, **last.data})
    except FileNotFoundError:
        return None
    return last


def last_records(path: Path, count: int) -> list[StepMetrics]:
    """The last `count` records of the file, oldest first, read from its end."""
    found: list[StepMetrics] = []
    try:
        for line in _lines_from_end(path):
            if record := parse_line(line):
                found.append(record)
                if len(found) == count:
                    break
    except OSError:
        return []
    return found[::-1]


def last_step(path: Path) -> int | None:
    """The last step in the file. A metrics line is written after the step's checkpoint and weight sync."""
    last = last_metrics(path)
    return last.step if last else None


def non_timing(data: Mapping[str, float | None]) -> dict[str, float | None]:
    """Without everything that depends on the clock or the machine: what two equal trainings must agree in."""
    return {name: value for name, value in data.items() if not any(mark in name for mark in _TIMING_MARKS)}


def differing(one: Mapping[str, float | None], other: Mapping[str, float | None]) -> list[str]:
    """Non-timing names whose values differ, or that only one has; exact comparison, NaN equal to NaN."""
    one, other = non_timing(one), non_timing(other)
    return sorted(k for k in one.keys() | other.keys() if k not in one or k not in other or one[k] != other[k])


def _lines_from_end(path: Path) -> Iterator[bytes]:
    """The lines of `path`, last first, without reading more of it than is asked for (64 MiB at most)."""
    with open(path, "rb") as file:
        position = file.seek(0, os.SEEK_END)
        stop = max(0, position - _TAIL_LIMIT_BYTES)
        pieces: list[bytes] = []  # of the line that began before `position`, last piece first
        while position > stop:
            size = min(_BLOCK_BYTES, position - stop)
            position -= size
            file.seek(position)
            first, *rest = file.read(size).split(b"\n")
            if not rest:
                pieces.append(first)
                continue
            yield rest[-1] + b"".join(reversed(pieces))
            yield from reversed(rest[:-1])
            pieces = [first]
        yield b"".join(reversed(pieces))
