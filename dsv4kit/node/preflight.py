"""The checks every node makes before a segment starts: seconds, in parallel, each failure in words to act on."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from dsv4kit.node import contents, inventory, ports
from dsv4kit.run.node_files import NodeFiles, NodeReport
from dsv4kit.run.node_spec import NodeSpec

GIB = 2**30
# The driver and its daemons take below 1 % of a GPU's memory.
_FOREIGN_SHARE = 0.1
# Ray's own recommendation is 65,536; below this its workers fail on one node of 8 GPUs.
_OPEN_FILES = 4096


def check(spec: NodeSpec, address: str, own: NodeFiles) -> NodeReport:
    """All checks of this node; `own` are its files in the run directory."""
    available = inventory.memory_available(spec.cpu_numa_nodes)
    problems = [
        *_limits(spec.device),
        *_memory(available, spec.limits.min_memory_bytes),
        *_shared_memory(spec.limits.min_shm_bytes),
        *_scratch(Path(spec.scratch_dir)),
        *_writable(own),
        *_ports(address),
        *_gpus(spec.ray.gpus, spec.device),
        *(_driver(spec.ray.gpus, inventory.gpus()) if spec.device == "cuda" else []),
        *(_devices(infiniband=inventory.infiniband()) if spec.device == "cuda" else []),
        *_fabric(spec.env, inventory.imex_channels()),
        *contents.problems(spec.needs),
    ]
    slurm_node = os.environ.get("SLURMD_NODENAME", "")
    return NodeReport(own.host, address, problems, round(available / GIB, 1), time.time(), slurm_node=slurm_node)


def _limits(device: str) -> Iterable[str]:
    """What the login shell or the node lets a process have: too little of it kills a trainer hours later.

    Ray and the data loaders keep thousands of files and sockets open; RDMA pins the memory it moves (about 64 MiB are
    not enough for one ring of NCCL).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if soft != resource.RLIM_INFINITY:
        yield f"a process may use {soft} s of CPU time (ulimit -t); unlimited is needed"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES:
        yield f"a process may open {soft} files (ulimit -n), at most {hard}; {_OPEN_FILES} are needed"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if device == "cuda" and soft != resource.RLIM_INFINITY and soft < GIB:
        yield f"a process may lock {soft // 1024} KiB of memory (ulimit -l); the network's transfers need unlimited"


class Clocks:
    """The nodes' clocks against this one.

    How long a report takes to be seen here is the file system's affair (minutes, on NFS), so only what no delay
    explains counts: a report from later than now, or from before the job began. `began` is when the batch script did,
    by this node's clock; None where it does not say.
    """

    def __init__(self, began: float | None, allowed_s: float = 60.0) -> None:
        self._began, self._allowed_s = began, allowed_s

    def off(self, reports: Iterable[NodeReport], now: float) -> list[str]:
        """The nodes whose clock is off by more than is allowed; `now` is this node's clock at this look."""
        found = {}
        for report in reports:
            ahead = report.time - now
            behind = report.time - self._began if self._began is not None else 0.0
            if ahead > self._allowed_s:
                found[report.host] = f"{ahead:+.0f} s off"
            elif behind < -self._allowed_s:
                found[report.host] = f"more than {-behind:.0f} s behind"
        return [f"{host}: its clock is {text}" for host, text in found.items()]


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


def _writable(own: NodeFiles) -> list[str]:
    """The shared file system takes a file from this node."""
    canary = own.canary
    try:
        canary.parent.mkdir(parents=True, exist_ok=True)
        canary.write_text("x" * 4096)
        canary.unlink()
    except OSError as error:
        return [f"run directory {own.attempt.path}: cannot be written from this node: {error.strerror}"]
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


def _gpus(needed: int, device: str) -> list[str]:
    """Slurm's own count of what this step was given.

    Where Slurm does not manage GPUs as a GRES the variable is not set: only nvidia-smi's count (`_driver`) is known.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None and device == "cuda":
        return []
    given = [gpu for gpu in (shown or "").split(",") if gpu not in ("", "NoDevFiles")]
    return [] if len(given) >= needed else [f"{len(given)} GPUs given by Slurm (CUDA_VISIBLE_DEVICES), {needed} needed"]


def _driver(needed: int, cards: list[inventory.Gpu] | None) -> list[str]:
    """The driver's view: all GPUs there, sound, and nobody else's memory on them."""
    if cards is None:
        return ["nvidia-smi: not there or without an answer; the container has no driver, or the node a broken one"]
    problems = [f"{len(cards)} GPUs shown by nvidia-smi, {needed} needed"] if len(cards) < needed else []
    for index, card in enumerate(cards):
        if card.uncorrected_errors:
            problems.append(f"GPU {index} ({card.name}): {card.uncorrected_errors} uncorrected memory errors")
        if card.used_mib > _FOREIGN_SHARE * card.memory_mib:
            problems.append(f"GPU {index} ({card.name}): {card.used_mib} of {card.memory_mib} MiB are in use already")
    return problems


def _devices(root: Path = Path("/dev"), infiniband: Mapping[str, str] | None = None) -> Iterable[str]:
    """Device nodes that a container may have been started without: CUDA's, and RDMA's where a port is up."""
    missing = [str(root / name) for name in ("nvidiactl", "nvidia-uvm") if not (root / name).exists()]
    if missing:
        yield f"no {' and no '.join(missing)} in this container or on this node: CUDA cannot start"
    ports_up = [port for port, state in (infiniband or {}).items() if "ACTIVE" in state]
    if ports_up and not any(root.glob("infiniband/uverbs*")):
        yield f"no {root}/infiniband/uverbs*, and {len(ports_up)} InfiniBand ports are up: NCCL would go over TCP"


def _fabric(env: Mapping[str, str], channels: int) -> list[str]:
    """NCCL falls back to the network by itself unless it is told that NVLink between nodes must work."""
    if env.get("NCCL_MNNVL_ENABLE") != "1" or channels:
        return []
    return ["no IMEX channel (/dev/nvidia-caps-imex-channels), and NCCL_MNNVL_ENABLE=1 makes it a must"]


def clocks() -> Clocks:
    """The clocks held against when this job's batch script says it began; older scripts do not say."""
    began = os.environ.get("DSV4KIT_BEGAN", "")
    return Clocks(float(began) if began.isdecimal() else None)
