"""Answers for this node when somebody asks what the processes of an attempt are doing (run/stacks.py).

Every Python process of a segment registers for one signal when it starts (node/sitecustomize.py) and then writes its
stack into a file of its own; a process that has not registered is never sent it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from dsv4kit.node import processes
from dsv4kit.node.attempt import Attempt
from dsv4kit.run import stacks
from dsv4kit.run.files import read_object
from dsv4kit.run.stacks import ProcessStack

# Where the processes of a node write; node-local, and below the attempt's own directory.
DIRECTORY = "stacks"
# Among the real-time signals, which no library of the stack uses.
SIGNAL = signal.SIGRTMIN + 7
_POLL_S = 1.0
_ANSWER_S = 3.0
_NAME_LENGTH = 80


class StackReporter:
    """A thread that answers for this node, each time that somebody asks."""

    def __init__(self, attempt: Attempt, temporary: Path) -> None:
        """`temporary`: the attempt's node-local directory."""
        self._attempt, self._directory = attempt, temporary / DIRECTORY
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stacks", daemon=True)

    def start(self) -> None:
        """Begins to listen."""
        with contextlib.suppress(OSError):  # the preflight says what is wrong with the scratch directory
            self._directory.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self._stopped.set()
        self._thread.join(timeout=2 * _ANSWER_S)

    def _run(self) -> None:
        answered = None
        while not self._stopped.wait(_POLL_S):
            asked = read_object(self._attempt.files.explain_file).get("asked")
            if isinstance(asked, float) and asked != answered:
                answered = asked
                with contextlib.suppress(OSError):
                    self._attempt.own.answer(stacks.as_content(asked, collect(self._directory)))


def collect(directory: Path) -> list[ProcessStack]:
    """The stacks of all of this process's descendants that write into `directory`, and those that cannot."""
    host = os.uname().nodename
    before: dict[int, int] = {}
    ill: list[ProcessStack] = []
    for pid in processes.descendants(os.getpid()):
        state, name = processes.state(pid), _name(pid)
        if processes.catches(pid, SIGNAL) and (path := directory / str(pid)).exists():
            before[pid] = path.stat().st_size
            with contextlib.suppress(OSError):
                os.kill(pid, SIGNAL)
        elif state in (stacks.STOPPED, stacks.UNINTERRUPTIBLE):
            ill.append(ProcessStack(host, pid, name, state, [], _kernel_function(pid)))
    texts = _grown(directory, before)
    answered = [
        ProcessStack(host, pid, _name(pid), processes.state(pid) or "gone", stacks.parse(text), _kernel_function(pid))
        for pid, text in texts.items()
    ]
    return sorted([*answered, *ill], key=lambda stack: stack.pid)


def _grown(directory: Path, before: dict[int, int]) -> dict[int, str]:
    """What each process has written since; waits until nothing more comes, or for as long as it may take."""
    deadline = time.monotonic() + _ANSWER_S
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = {pid: (directory / str(pid)).stat().st_size for pid in before}
        if now == sizes and all(now[pid] > before[pid] for pid in before):
            break
        sizes = now
    found = {}
    for pid, size in before.items():
        with (directory / str(pid)).open("rb") as file:
            file.seek(size)
            found[pid] = file.read().decode(errors="replace")
    return found


def _name(pid: int) -> str:
    """A process as people know it: the title that Ray gives it, else the module or script that Python runs."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    words = [word for word in words if word]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1][:_NAME_LENGTH]
    scripts = [word for word in words[1:3] if word.endswith(".py")]
    return os.path.basename(scripts[0] if scripts else words[0] if words else "?")[:_NAME_LENGTH]


def _kernel_function(pid: int) -> str:
    try:
        found = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if found == "0" else found
