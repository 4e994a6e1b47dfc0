"""When a worker's `ray start` begins. Ray's client is stood in for: a real one of a head that was started anew says
WrongClusterID for ever."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

CLIENT = """
import os, pathlib
from types import SimpleNamespace

made = pathlib.Path(os.environ["MADE"])

class GcsClient:
    def __init__(self, address):
        made.write_text(f"{int(made.read_text() or 0) + 1}")
        self.first = made.read_text() == "1"

    def get_all_node_info(self, timeout):
        if self.first:
            raise RuntimeError("WrongClusterID")
        return {1: SimpleNamespace(state=0, is_head_node=True)}
"""


def test_it_asks_with_a_new_client_once_the_old_one_has_failed(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    (ray / "scripts").mkdir(parents=True)
    (ray / "_raylet.py").write_text(CLIENT)
    (ray / "scripts" / "scripts.py").write_text("def main():\n    import sys\n    print(*sys.argv[1:])\n")
    made = tmp_path / "made"
    made.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (tmp_path / "head.json").write_text(json.dumps({"address": address}))
        path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
        command = [sys.executable, "-m", "dsv4kit.node.ray.worker", tmp_path / "head.json", "30", "start", "--block"]
        environment = {**os.environ, "PYTHONPATH": path, "MADE": str(made)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"start --block --address={address}")
    assert made.read_text() == "2"
