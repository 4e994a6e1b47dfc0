"""`ray start` that waits for its own node for as long as it is given, and not for 30 s.

Ray gives a raylet 30 s to register (a number in `Node.__init__` of ray/_private/node.py, 2.60) and then gives up,
although the raylet is alive and only slow: on a loaded node, or where its binary comes from a slow file system. A new
start is slower still.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.2


def lift_limit(wait_s: float) -> None:
    """From now on `ray start` in this process waits up to `wait_s` for a raylet that is alive."""
    from ray._private import services

    ask = services.get_node
    deadline = time.monotonic() + wait_s

    def get_node(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return ask(gcs_address, node_id)
            except RuntimeError:  # it has not registered yet
                if time.monotonic() > deadline or not _raylet_lives():
                    raise
            time.sleep(_POLL_S)

    services.get_node = get_node


def _raylet_lives() -> bool:
    """Whether a child of this process is a raylet."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    children = (pid for task in tasks.iterdir() for pid in (task / "children").read_text().split())
    return any(_command(pid) == "raylet" for pid in children)


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def main() -> None:
    """`python -m dsv4kit.node.ray.patience WAIT_S start ...`: the head's `ray start`."""
    from ray.scripts.scripts import main as ray

    lift_limit(float(sys.argv[1]))
    sys.argv = ["ray", *sys.argv[2:]]
    sys.exit(ray())


if __name__ == "__main__":
    main()
