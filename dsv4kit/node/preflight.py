"""The checks every node makes before a segment starts: seconds, in parallel, each failure in words to act on."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dsv4kit.node import ports
from dsv4kit.node.spec import NodeSpec

GIB = 2**30


@dataclass(frozen=True)
class NodeReport:
    """What one node found out about itself; no problems means it can take part."""

    host: str
    address: str
    problems: list[str] = field(default_factory=list)
    memory_available_gib: float = 0.0
    time: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def check(spec: NodeSpec, address: str, attempt_dir: Path) -> NodeReport:
    """All checks of this node."""
    available = memory_available_bytes()
    problems = [
        *_memory(available, spec.limits.min_memory_bytes),
        *_shared_memory(spec.limits.min_shm_bytes),
        *_scratch(Path(spec.scratch_dir)),
        *_writable(attempt_dir),
        *_ports(address),
        *_gpus(spec.ray.gpus),
    ]
    return NodeReport(socket.gethostname(), address, problems, round(available / GIB, 1), time.time())


def clock_skew(reports: Iterable[NodeReport], allowed_s: float = 30.0) -> list[str]:
    """Nodes whose clock differs from the median by more than `allowed_s`.

    Reports are made within seconds of each other, so the threshold holds start-up jitter and real skew apart.
    """
    times = sorted(report.time for report in reports)
    if not times:
        return []
    median = times[len(times) // 2]
    return [
        f"{report.host}: its clock is {report.time - median:+.0f} s off"
        for report in reports
        if abs(report.time - median) > allowed_s
    ]


def memory_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable of the node."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _memory(available: int, needed: int) -> list[str]:
    if available >= needed:
        return []
    return [f"host memory: {available / GIB:.1f} GiB available, {needed / GIB:.1f} GiB needed"]


def _shared_memory(needed: int) -> list[str]:
    free = shutil.disk_usage("/dev/shm").free
    return (
        []
        if free >= needed
        else [f"/dev/shm: {free / GIB:.1f} GiB free, {needed / GIB:.1f} GiB needed for Ray's object store"]
    )


def _scratch(scratch: Path) -> list[str]:
    """Node-local scratch: there, writable, with some room for sockets and logs."""
    if not scratch.is_dir() or not os.access(scratch, os.W_OK):
        return [f"scratch directory {scratch}: not there or not writable"]
    free = shutil.disk_usage(scratch).free
    return [] if free >= GIB else [f"scratch directory {scratch}: {free / GIB:.2f} GiB free, 1 GiB needed"]


def _writable(attempt_dir: Path) -> list[str]:
    """The shared file system takes a file from this node."""
    canary = attempt_dir / "nodes" / f".canary-{socket.gethostname()}"
    try:
        canary.parent.mkdir(parents=True, exist_ok=True)
        canary.write_text("x" * 4096)
        canary.unlink()
    except OSError as error:
        return [f"run directory {attempt_dir}: cannot be written from this node: {error.strerror}"]
    return []


def _ports(address: str) -> list[str]:
    floor = ports.ephemeral_floor()
    taken = [f"{port} ({use})" for use, port in ports.FIXED.items() if not _bindable(address, port)]
    problems = [f"ports taken on this node: {', '.join(taken)}"] if taken else []
    if floor <= ports.WORKER_LAST:
        problems.append(f"ip_local_port_range begins at {floor}, inside the kit's ports (up to {ports.WORKER_LAST})")
    return problems


def _bindable(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _gpus(needed: int) -> list[str]:
    """Slurm's own count of what this step was given."""
    given = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return [] if len(given) >= needed else [f"{len(given)} GPUs given by Slurm (CUDA_VISIBLE_DEVICES), {needed} needed"]
