"""`wait_alive.py ADDRESS NODES`: ends once so many nodes are alive; a look through the GCS client costs 0.3 ms."""

import sys
import time

from ray._raylet import GcsClient


def alive(address: str) -> int:
    """0 as long as the GCS does not answer."""
    try:
        return sum(node.state == 0 for node in GcsClient(address=address).get_all_node_info(timeout=5).values())
    except Exception:
        return 0


while alive(sys.argv[1]) < int(sys.argv[2]):
    time.sleep(0.1)
