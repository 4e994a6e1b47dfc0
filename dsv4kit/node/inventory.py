"""What a node has: memory by NUMA node, GPUs, fabric, disks, software. Looks only; the preflight judges."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_GB = 1e9
_SYSTEM = Path("/sys/devices/system/node")
_IMEX = Path("/dev/nvidia-caps-imex-channels")
_PACKAGES = ("verl", "vllm", "torch", "ray", "megatron-core", "megatron-bridge")
_GPU_QUERY = ("name", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total")


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi shows it; memory in MiB; None where the driver does not say."""

    name: str
    memory_mib: int
    used_mib: int
    uncorrected_errors: int | None


def memory_by_numa_node(root: Path = _SYSTEM) -> dict[int, tuple[int, int]]:
    """NUMA node -> bytes it has, and bytes a program could still get: free, or cache that can be dropped.

    The kernel has no MemAvailable per node; this leaves out what it keeps back (some hundred MB).
    """
    found = {}
    for path in sorted(root.glob("node[0-9]*/meminfo")):
        values = {}
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            values[name.split()[-1]] = int(value.split()[0]) * 1024
        cache = values.get("FilePages", 0) - values.get("Shmem", 0) + values.get("SReclaimable", 0)
        available = min(values["MemTotal"], values["MemFree"] + max(cache, 0))
        found[int(path.parent.name.removeprefix("node"))] = (values["MemTotal"], available)
    return found


def memory_available(numa_nodes: Iterable[int], meminfo: Path = Path("/proc/meminfo"), root: Path = _SYSTEM) -> int:
    """Bytes available on the node's CPU memory.

    `numa_nodes` are those of the CPUs. Where the system has more, the others are GPU memory (GB200), which
    /proc/meminfo adds in; there only the CPUs' count.
    """
    by_node, wanted = memory_by_numa_node(root), set(numa_nodes)
    if wanted and wanted < by_node.keys():
        return sum(available for node, (_, available) in by_node.items() if node in wanted)
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def gpus() -> list[Gpu] | None:
    """The node's GPUs; None where there is no nvidia-smi or it does not answer."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_gpus(done.stdout) if done.returncode == 0 else None


def parse_gpus(text: str) -> list[Gpu]:
    """nvidia-smi's answer to `gpus`."""
    found = []
    for line in text.splitlines():
        name, total, used, errors = (cell.strip() for cell in line.rsplit(",", 3))
        found.append(Gpu(name, int(total), int(used), int(errors) if errors.isdigit() else None))
    return found


def fabric() -> str:
    """State of the NVLink fabric: `Completed`, `In Progress`, ...; `` where nvidia-smi has no word for it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-q"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return parse_fabric(done.stdout)


def parse_fabric(text: str) -> str:
    """The states under `Fabric` of `nvidia-smi -q`, each once."""
    states, inside = [], False
    for line in text.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "Fabric" and not value:
            inside = True
        elif inside and name == "State":
            states.append(value)
            inside = False
    return ", ".join(sorted({state for state in states if state != "N/A"}))


def imex_channels(directory: Path = _IMEX) -> int:
    """IMEX channels this container or node can use: without one there is no NVLink to other trays."""
    try:
        return len(os.listdir(directory))
    except OSError:
        return 0


def infiniband(root: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Port -> state and rate, e.g. `mlx5_0/1`: `4: ACTIVE, 400 Gb/sec (4X NDR)`."""
    found = {}
    for port in sorted(root.glob("*/ports/*")):
        try:
            state, rate = ((port / name).read_text().strip() for name in ("state", "rate"))
        except OSError:
            continue
        found[f"{port.parent.parent.name}/{port.name}"] = f"{state}, {rate}"
    return found


def versions() -> dict[str, str]:
    """Versions of what trains, as installed for this Python."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def facts(scratch: str) -> dict[str, object]:
    """All of it, for the doctor's table. GB are 10**9 bytes."""
    cards = gpus()
    names = sorted({card.name for card in cards or []})
    return {
        "memory_gb": {str(node): round(total / _GB, 1) for node, (total, _) in memory_by_numa_node().items()},
        "gpus": f"{len(cards)} x {', '.join(names)}" if cards else "none",
        "gpu_memory_used_mib": max((card.used_mib for card in cards or []), default=0),
        "fabric": fabric() if cards else "",
        "imex_channels": imex_channels(),
        "infiniband": infiniband(),
        "shm_free_gb": round(shutil.disk_usage("/dev/shm").free / _GB, 1),
        "scratch_free_gb": round(shutil.disk_usage(scratch).free / _GB, 1) if os.path.isdir(scratch) else 0.0,
        "versions": versions(),
        "python": platform.python_version(),
        "bash": shutil.which("bash") or "",
    }
