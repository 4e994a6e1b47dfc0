"""Memory of one node over time. verl's own metrics show only the ranks of the last pipeline stage."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from pathlib import Path

from dsv4kit.run import samples

_MIB = 2**20


class Sampler:
    """A thread that appends one line per interval until `stop`; the columns are those of `run/samples.py`."""

    def __init__(self, path: Path, interval_s: float) -> None:
        self._path = path
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Begins sampling."""
        self._thread.start()

    def stop(self) -> None:
        """Ends sampling; the last line is whole."""
        self._stopped.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            if file.tell() == 0:
                samples.write_head(file, sample())
            while True:
                samples.write_row(file, time.time(), sample())
                if self._stopped.wait(self._interval_s):
                    return


def sample() -> dict[str, int]:
    """One look at the node: column name -> MiB."""
    memory = _meminfo()
    values = {
        samples.MEMORY_USED: memory["MemTotal"] - memory["MemAvailable"],
        samples.MEMORY_AVAILABLE: memory["MemAvailable"],
        samples.SHM_USED: shutil.disk_usage("/dev/shm").used // _MIB,
    }
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/meminfo")):
        values[samples.numa_used(int(path.parent.name.removeprefix("node")))] = _numa_used(path)
    return values | {samples.gpu_used(index): used for index, used in enumerate(_gpu_used())}


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.partition(":")[0]: int(line.split()[1]) // 1024 for line in lines}


def _numa_used(path: Path) -> int:
    for line in path.read_text().splitlines():
        if "MemUsed:" in line:
            return int(line.split()[-2]) // 1024
    return 0


def _gpu_used() -> list[int]:
    """Used memory of each GPU; empty where there is no nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout
    return [int(line) for line in output.split() if line.isdigit()]
