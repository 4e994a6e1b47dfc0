"""When a worker's `ray start` begins. Ray's client is stood in for: a real one of a head that was started anew says
WrongClusterID for ever."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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
    (ray / "_private").mkdir()
    (ray / "_private" / "services.py").write_text("def get_node(gcs_address, node_id):\n    raise RuntimeError\n")
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


@pytest.mark.parametrize(("alive", "answer"), [(True, "registered"), (False, "RuntimeError")])
def test_a_raylet_that_is_alive_is_waited_for_one_that_is_not_is_not(tmp_path: Path, alive: bool, answer: str) -> None:
    private = tmp_path / "ray" / "_private"
    private.mkdir(parents=True)
    (private / "services.py").write_text(
        "asked = []\n"
        "def get_node(gcs_address, node_id):\n"
        "    asked.append(node_id)\n"
        f"    if len(asked) < {4 if alive else 100}:\n"
        "        raise RuntimeError('not yet')\n"
        "    return 'registered'\n"
    )
    raylet = tmp_path / "raylet"
    raylet.symlink_to(shutil.which("sleep") or "sleep")
    code = (
        "import subprocess, sys\n"
        "from dsv4kit.node.ray import patience\n"
        "from ray._private import services\n"
        f"raylet = subprocess.Popen([{str(raylet)!r}, '60'])\n"
        f"{'' if alive else 'raylet.kill(); raylet.wait()'}\n"
        "patience.lift_limit(30)\n"
        "try:\n    print(services.get_node('a', 'b'))\n"
        "except RuntimeError:\n    print('RuntimeError')\n"
        "finally:\n    raylet.kill()\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.strip() == answer, done.stderr
