"""Memory of one node over time, as CSV: `time` (s since the epoch), then MiB by name.

`memory_used_mib` and `memory_available_mib` of the node, `shm_used_mib`, one `numa<K>_used_mib` per NUMA node, and one
`gpu<K>_used_mib` per GPU.

Standard library only; frozen into every run.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Mapping
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
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return [], {}
    head = lines[0].rstrip("\r").split(",")
    rows = []
    for line in lines[1:]:
        cells = line.split(",")
        if len(cells) == len(head):
            with contextlib.suppress(ValueError):
                rows.append(list(map(float, cells)))
    if head[0] != _TIME or not rows:
        return [], {}
    times, *columns = map(list, zip(*rows, strict=True))
    return times, dict(zip(head[1:], columns, strict=True))
