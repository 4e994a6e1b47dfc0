"""The driver of every method: joins the Ray cluster, writes down what it found and when, and ends."""

import json
import os
import time
from pathlib import Path

began = time.time()


def busy_s() -> float:
    """Seconds that all CPUs of the machine have worked since it was started (man 5 proc, /proc/stat)."""
    first = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _, _, interrupts, softirqs = (int(word) for word in first.split()[1:8])
    return (user + nice + system + interrupts + softirqs) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Writes to the file that BRINGUP_OUT names."""
    import ray
    from ray._raylet import GcsClient

    address = os.environ["RAY_ADDRESS"]
    ray.init(address=address, log_to_driver=False)
    first_line = time.time()
    nodes = [node for node in GcsClient(address=address).get_all_node_info().values() if node.state == 0]
    found = {
        "process_s": began,
        "first_line_s": first_line,
        "nodes": len(nodes),
        "head_alive_s": min(node.start_time_ms for node in nodes if node.is_head_node) / 1000,
        "all_alive_s": max(node.start_time_ms for node in nodes) / 1000,
        "busy_s": busy_s(),
    }
    out = Path(os.environ["BRINGUP_OUT"])
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.replace(out)


if __name__ == "__main__":
    main()
