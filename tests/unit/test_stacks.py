"""What processes are doing: read from faulthandler's text, put together over nodes, and who is the odd one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dsv4kit.node import stacks as node_stacks
from dsv4kit.run import stacks
from dsv4kit.run.directory import RunDir
from dsv4kit.run.node_files import NodeFiles
from dsv4kit.run.stacks import Frame, ProcessStack

REDUCE = [Frame("all_reduce", "/t/distributed_c10d.py", 2806), Frame("update", "/v/actor.py", 7)]
OPEN = [Frame("open", "/p/pathlib.py", 3)]
KIT = Path(__file__).parents[2] / "dsv4kit" / "node"


def process(host: str, pid: int, frames: list[Frame] = REDUCE, state: str = "S") -> ProcessStack:
    return ProcessStack(host, pid, "ray::WorkerDict.actor_update", state, frames)


def test_the_calls_of_the_thread_that_took_the_signal_are_read() -> None:
    text = (
        'Thread 0x00007f (most recent call first):\n  File "/x/a.py", line 1 in other\n\n'
        'Current thread 0x00007e (most recent call first):\n  File "/x/b.py", line 2 in <lambda>\n'
        '  File "/x/c with, line.py", line 3 in main\n'
    )
    assert stacks.parse(text) == [Frame("<lambda>", "/x/b.py", 2), Frame("main", "/x/c with, line.py", 3)]
    assert stacks.parse("garbage\n  File half") == []


def test_the_many_are_one_line_and_the_few_are_named() -> None:
    crowd = [process(f"node{number // 4}", number) for number in range(8)]
    crowd[5] = process("node1", 5, OPEN)
    assert stacks.described(crowd) == [
        "1 of 8 ray::WorkerDict (node1 pid 5): open (pathlib.py:3)",
        "7 of 8 ray::WorkerDict: all_reduce (distributed_c10d.py:2806) < update (actor.py:7)",
    ]
    assert stacks.odd_nodes(crowd) == ["node1"]


def test_what_cannot_go_on_comes_first_and_is_to_blame() -> None:
    two = [process("node1", 1), process("node2", 2, [], "T")]
    assert stacks.described(two)[0] == "1 of 2 ray::WorkerDict (node2 pid 2): stopped by a signal"
    assert stacks.odd_nodes(two) == ["node2"]
    silent = process("node2", 3, [], "R")
    assert str(silent) == "did not answer (state R)"


def test_no_node_is_blamed_without_a_majority_or_where_two_differ() -> None:
    assert stacks.odd_nodes([process("node1", 1), process("node2", 2, OPEN)]) == []
    assert stacks.odd_nodes([process("node1", 1, OPEN), process("node2", 2, OPEN), *_alike(3, 9)]) == []
    assert stacks.odd_nodes([process("node1", 1), process("node1", 2, OPEN), process("node1", 3)]) == []
    assert stacks.odd_nodes([]) == []


def _alike(first: int, last: int) -> list[ProcessStack]:
    return [process(f"node{number}", number) for number in range(first, last)]


def test_a_question_is_answered_by_its_own_answers_only(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).segment(1).attempt(0)
    attempt.nodes.mkdir(parents=True)
    found = [process("node1", 1), process("node1", 2, OPEN)]
    NodeFiles(attempt, "node1").answer(stacks.as_content(1.5, found))
    assert stacks.of_content(stacks.stack_answers(attempt)[0], 1.5) == found
    assert stacks.of_content(stacks.stack_answers(attempt)[0], 2.5) is None


def test_every_python_below_tells_where_it_is_and_others_are_left_alone(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(KIT), "DSV4KIT_STACKS_DIR": str(tmp_path)}
    code = "import time\ndef waits_here():\n    time.sleep(60)\nprint('up', flush=True)\nwaits_here()"
    python = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    stopped = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    other = subprocess.Popen(["sleep", "60"])
    try:
        for one in (python, stopped):
            assert one.stdout is not None
            assert one.stdout.readline() == b"up\n"
        os.kill(stopped.pid, signal.SIGSTOP)
        (tmp_path / str(other.pid)).touch()  # as a process of that number once did
        time.sleep(0.1)
        found = {stack.pid: stack for stack in node_stacks.collect(tmp_path)}
        assert [frame.function for frame in found[python.pid].frames][:2] == ["waits_here", "<module>"]
        assert (found[stopped.pid].state, found[stopped.pid].frames) == ("T", [])
        assert other.pid not in found
        assert other.poll() is None
        assert python.poll() is None
    finally:
        for one in (python, stopped, other):
            one.kill()
            one.wait()
