"""`python -m dsv4kit.node.ray.worker HEAD_FILE DEADLINE_S start ...`: a worker's `ray start` at the right moment.

It imports everything first and then waits for the head *node* to be registered. A `ray start` that comes earlier sleeps
in steps of one and two seconds inside Ray; one started only after the head is up pays the import of 1.5 s late.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

from dsv4kit.node.ray import patience

_POLL_S = 0.1


def main() -> None:
    """Waits for the head, then becomes `ray start --block`. Exit status 1 when the deadline passes first."""
    from ray._raylet import GcsClient
    from ray.scripts.scripts import main as ray

    head_file, deadline_s, arguments = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    deadline = time.monotonic() + deadline_s
    client = None
    while time.monotonic() < deadline:
        try:
            address = json.loads(head_file.read_text())["address"]
            host, port = address.rsplit(":", 1)
            if client is None:
                socket.create_connection((host, int(port)), 1).close()
                client = GcsClient(address=address)
            if any(node.state == 0 and node.is_head_node for node in client.get_all_node_info(timeout=5).values()):
                break
        except Exception:  # every failure here means "not yet"
            client = None  # a head that is started anew is another cluster, which a client of the old one never sees
        time.sleep(_POLL_S)
    else:
        sys.exit(f"no Ray head after {deadline_s:.0f} s (looked for {head_file})")
    patience.lift_limit(deadline - time.monotonic())
    sys.argv = ["ray", *arguments, f"--address={address}"]
    sys.exit(ray())


if __name__ == "__main__":
    main()
