"""Memory of one node over time, as CSV: `time` (s since the epoch), then MiB by name.

`memory_used_mib` and `memory_available_mib` of the node, `shm_used_mib`, one `numa<K>_used_mib` per NUMA node, and one
`gpu<K>_used_mib` per GPU.

Standard library only; frozen into every run.
"""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

MEMORY_USED = "memory_used_mib"
MEMORY_AVAILABLE = "memory_available_mib"
SHM_USED = "shm_used_mib"
_TIME = "time"
_GPU = "gpu"


def numa_used(index: int) -> str:
    """Column of a NUMA node."""
    return f"numa{index}_used_mib"


def gpu_used(index: int) -> str:
    """Column of a GPU."""
    return f"{_GPU}{index}_used_mib"


def is_gpu(column: str) -> bool:
    """Whether it is the column of a GPU."""
    return column.startswith(_GPU)


def write_head(file: TextIO, values: Mapping[str, int]) -> None:
    """The names of the columns."""
    file.write(",".join([_TIME, *values]) + "\n")


def write_row(file: TextIO, time: float, values: Mapping[str, int]) -> None:
    """One line, whole when this returns."""
    file.write(",".join([f"{time:.1f}", *map(str, values.values())]) + "\n")
    file.flush()


def read(path: Path) -> Iterator[dict[str, float]]:
    """The rows; cells that are not numbers (a half-written last line) are left out."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for row in csv.DictReader(file):
            yield {
                name: float(text)
                for name, text in row.items()
                if isinstance(name, str) and isinstance(text, str) and text.replace(".", "", 1).isdigit()
            }


def table(path: Path) -> tuple[list[float], dict[str, list[float]]]:
    """Times, and MiB by column; rows that are not whole are left out. A file that does not exist (yet) has none."""
    try:
        head, *lines = path.read_bytes().split(b"\n")
    except OSError:
        return [], {}
    return _columns(head, lines)


def thinned(path: Path, rows: int) -> tuple[tuple[list[float], dict[str, list[float]]], bool]:
    """As `table`, and whether only a part was read: of a long file some `rows` rows, evenly over its length."""
    try:
        with path.open("rb") as file:
            head = file.readline()
            width = len(file.readline()) or 1
            size = file.seek(0, os.SEEK_END) - len(head)
            if size <= 2 * rows * width:
                return table(path), False
            lines = []
            for number in range(rows):
                file.seek(len(head) + size * number // rows)
                if number:
                    file.readline()  # the rest of a row
                lines.append(file.readline().rstrip(b"\n"))
    except OSError:
        return ([], {}), False
    return _columns(head, lines), True


def _columns(head: bytes, lines: Iterable[bytes]) -> tuple[list[float], dict[str, list[float]]]:
    names = head.decode(errors="replace").strip().split(",")
    rows = []
    for line in lines:
        cells = line.split(b",")
        if len(cells) == len(names):
            with contextlib.suppress(ValueError):
                rows.append(list(map(float, cells)))
    if names[0] != _TIME or not rows:
        return [], {}
    times, *columns = map(list, zip(*rows, strict=True))
    return times, dict(zip(names[1:], columns, strict=True))
