"""Every port the kit opens, in one table.

All lie below 9000: the range the kernel hands out to outgoing connections starts at 32768 on most machines but at 9000
on some GB200 systems, and a fixed port inside that range is taken by accident now and then.
"""

from __future__ import annotations

from pathlib import Path

GCS = 6379
NODE_MANAGER = 6380
OBJECT_MANAGER = 6381
RUNTIME_ENV_AGENT = 6382
DASHBOARD_AGENT_GRPC = 6383
DASHBOARD_AGENT_HTTP = 6384
METRICS_EXPORT = 6385
RAY_CLIENT_SERVER = 6386
# torchrun's rendezvous on node 0, and the store of the process group.
TORCHRUN = 6387
# One port per Ray worker process of a node; verl starts about ten per GPU. Ray refuses a range that holds 8265, the
# port of a dashboard nobody starts.
WORKER_FIRST, WORKER_LAST = 6500, 8199

FIXED = {
    "gcs": GCS,
    "node manager": NODE_MANAGER,
    "object manager": OBJECT_MANAGER,
    "runtime env agent": RUNTIME_ENV_AGENT,
    "dashboard agent grpc": DASHBOARD_AGENT_GRPC,
    "dashboard agent http": DASHBOARD_AGENT_HTTP,
    "metrics export": METRICS_EXPORT,
    "ray client server": RAY_CLIENT_SERVER,
    "torchrun": TORCHRUN,
}


def ephemeral_floor() -> int:
    """Lowest port the kernel hands out by itself."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768  # the kernel's default
