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

from dsv4kit.node import processes

_POLL_S = 0.2
# Looks in a row without a raylet: one that has only just been started does not have its name yet.
_MISSED = 5


def lift_limit(wait_s: float) -> None:
    """From now on `ray start` in this process waits up to `wait_s` for a raylet that is alive."""
    from ray._private import services

    ask = services.get_node
    deadline = time.monotonic() + wait_s

    def get_node(gcs_address: str, node_id: str) -> Any:
        missed = 0
        while True:
            try:
                return ask(gcs_address, node_id)
            except RuntimeError:  # it has not registered yet
                missed = 0 if _raylet_lives() else missed + 1
                if time.monotonic() > deadline or missed == _MISSED:
                    raise
            time.sleep(_POLL_S)

    services.get_node = get_node


def _raylet_lives() -> bool:
    """Whether a descendant of this process is a raylet."""
    return any(_command(pid) == "raylet" for pid in processes.descendants(os.getpid()))


def _command(pid: int) -> str:
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
