"""Ray on all nodes of a segment: the head on node 0, one worker per further node, all started at the same moment.

The driver may start only when every node has joined with what the plan counts on, because verl waits without end and
without a word for a node that never came.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dsv4kit.node import ports, processes
from dsv4kit.run.directory import AttemptDir
from dsv4kit.run.files import read_json, write_json
from dsv4kit.run.node_spec import NodeResources

# Below the temporary directory Ray makes session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store; a socket's
# whole path may have 107 bytes.
_SOCKET_SUFFIX = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
_SOCKET_LIMIT = 107

# What Slurm's GPU plugin exports beside CUDA_VISIBLE_DEVICES; verl refuses to start when it finds the first.
FOREIGN_GPU_VARIABLES = ("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "HIP_VISIBLE_DEVICES")


def temp_dir(scratch: str, job_id: str, attempt: int) -> Path:
    """Ray's node-local directory for one attempt. Raises ValueError when a socket below it has too long a path."""
    path = Path(scratch) / f"ray-{job_id}-{attempt}"
    length = len(str(path)) + _SOCKET_SUFFIX
    if length > _SOCKET_LIMIT:
        raise ValueError(f"scratch_dir {scratch!r} is {length - _SOCKET_LIMIT} bytes too long for Ray's sockets")
    return path


def head_arguments(address: str, resources: NodeResources, temporary: Path) -> list[str]:
    """Arguments of `ray` for the head."""
    return [
        "start",
        "--head",
        f"--port={ports.GCS}",
        f"--ray-client-server-port={ports.RAY_CLIENT_SERVER}",
        f"--temp-dir={temporary}",
        "--include-dashboard=false",
        "--no-monitor",  # of the autoscaler: the nodes are Slurm's
        *_common(address, resources),
    ]


def worker_arguments(address: str, resources: NodeResources) -> list[str]:
    """Arguments of `ray` for a worker, the head's address left out: it is known only once the head has published it.

    A worker has no `--temp-dir`: Ray makes it use the head's, which is node-local by its place below `scratch_dir`.
    """
    return ["start", *_common(address, resources)]


def _common(address: str, resources: NodeResources) -> list[str]:
    return [
        f"--node-ip-address={address}",
        f"--node-manager-port={ports.NODE_MANAGER}",
        f"--object-manager-port={ports.OBJECT_MANAGER}",
        f"--runtime-env-agent-port={ports.RUNTIME_ENV_AGENT}",
        f"--dashboard-agent-grpc-port={ports.DASHBOARD_AGENT_GRPC}",
        f"--dashboard-agent-listen-port={ports.DASHBOARD_AGENT_HTTP}",
        f"--metrics-export-port={ports.METRICS_EXPORT}",
        f"--min-worker-port={ports.WORKER_FIRST}",
        f"--max-worker-port={ports.WORKER_LAST}",
        f"--num-cpus={resources.cpus}",
        f"--num-gpus={resources.gpus}",
        f"--object-store-memory={resources.object_store_bytes}",
        "--disable-usage-stats",
        "--block",
    ]


def start_head(
    address: str, resources: NodeResources, temporary: Path, env: Mapping[str, str], attempt: AttemptDir, log: Path
) -> subprocess.Popen[bytes]:
    """Starts the head and publishes its address to the other nodes."""
    argv = [sys.executable, "-m", "dsv4kit.node.ray.patience", str(resources.ready_deadline_s)]
    argv += head_arguments(address, resources, temporary)
    process = processes.start(argv, env, log, attempt.path)
    write_json(attempt.ray_head_file, {"address": f"{address}:{ports.GCS}"})
    return process


def start_worker(
    address: str, resources: NodeResources, env: Mapping[str, str], attempt: AttemptDir, log: Path
) -> subprocess.Popen[bytes]:
    """Starts a worker that joins as soon as the head takes it, see `ray_worker`."""
    # Longer than node 0 may take, which starts a head anew that did not come up: it knows whose fault it is.
    patience_s = 2 * resources.ready_deadline_s
    argv = [sys.executable, "-m", "dsv4kit.node.ray.worker", str(attempt.ray_head_file)]
    argv += [str(patience_s), *worker_arguments(address, resources)]
    return processes.start(argv, env, log, attempt.path)


def start_readiness_watch(
    address: str, nodes: int, resources: NodeResources, env: Mapping[str, str], attempt: AttemptDir, log: Path
) -> subprocess.Popen[bytes]:
    """A process that ends with status 0 once all nodes have joined, see `ray_ready`; it writes `ray_nodes.json`."""
    argv = [
        sys.executable,
        "-m",
        "dsv4kit.node.ray.ready",
        f"{address}:{ports.GCS}",
        str(attempt.ray_nodes_file),
    ]
    argv += [str(nodes), str(resources.gpus), str(resources.cpus), str(resources.ready_deadline_s)]
    return processes.start(argv, env, log, attempt.path)


class Starter:
    """Keeps starting Ray on this node until it is up; one that is alive and late is waited for (`ray_patience`)."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]], deadline_s: float) -> None:
        """`start` starts Ray's process; for `deadline_s` seconds it is started again when it ends."""
        self._start = start
        self._deadline = time.monotonic() + deadline_s
        self.process = start()

    def failure(self, cluster_is_ready: bool) -> str | None:
        """Why Ray is down on this node for good, or None. Starts it again where that still makes sense."""
        status = self.process.poll()
        if status is None:
            return None
        if cluster_is_ready or time.monotonic() > self._deadline:
            return f"Ray on this node ended with status {status}"
        processes.end_descendants(grace_s=1)
        self.process = self._start()
        return None


def joined(attempt: AttemptDir) -> list[str]:
    """Addresses of the nodes that had joined when the readiness watch last looked."""
    return [str(address) for address in read_json(attempt.ray_nodes_file) or []]


def keep_logs(temporary: Path, destination: Path, limit_bytes: int = 50 * 2**20) -> None:
    """Copies Ray's logs of this node out of its scratch, smallest first, up to a total of `limit_bytes`."""
    logs = [path for path in temporary.glob("session_2*/logs/*") if path.is_file() and path.stat().st_size]
    total = 0
    for path in sorted(logs, key=lambda log: log.stat().st_size):
        total += path.stat().st_size
        if total > limit_bytes:
            return
        destination.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, destination / path.name)
