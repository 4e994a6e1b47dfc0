"""What every process of an attempt is doing, as its nodes tell it when asked, and which node is the odd one.

`explain.json` of an attempt asks; each node answers in `nodes/<host>.stacks` (node_files).

Standard library only; frozen into every run.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsv4kit.run.directory import AttemptDir
from dsv4kit.run.files import write_json
from dsv4kit.run.node_files import stack_answers

# What faulthandler writes, innermost call first.
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)')
_THREAD = re.compile(r"(?P<current>Current thread|Thread) 0x[0-9a-f]+")
# Letters of /proc/PID/stat in which a process cannot answer, or would not be expected to stay.
STOPPED, UNINTERRUPTIBLE = "T", "D"
_STATES = {STOPPED: "stopped by a signal", "t": "stopped by a debugger", UNINTERRUPTIBLE: "waiting in the kernel"}
# From so many processes of a kind on, the many can show that the few are wrong.
_CROWD = 3
# For the nodes to see the question, and for the shared file system to show what they wrote.
ALL_ANSWERS_S = 15.0
_POLL_S = 0.25


class Frame(NamedTuple):
    """One call."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({os.path.basename(self.file)}:{self.line})"


@dataclass(frozen=True)
class ProcessStack:
    """One process: its name, its state in /proc, and the calls its main thread is in, the innermost first.

    No frames: it did not answer. `where`: the kernel function it waits in, if it is known.
    """

    host: str
    pid: int
    name: str
    state: str
    frames: list[Frame]
    where: str = ""

    @property
    def kind(self) -> str:
        """What it has in common with its like on other nodes: a Ray actor's class, or the module."""
        return self.name.partition(".")[0] if self.name.startswith("ray::") else self.name

    @property
    def ill(self) -> bool:
        """Whether it cannot go on, whatever the others do."""
        return self.state in _STATES or not self.frames

    @property
    def doing(self) -> tuple[tuple[str, str], ...]:
        """What two processes have to share to be in the same place; a loop's line may differ."""
        return tuple((frame.function, frame.file) for frame in self.frames)

    def __str__(self) -> str:
        if self.state in _STATES:
            kernel = f" ({self.where})" if self.where and self.state == UNINTERRUPTIBLE else ""
            return _STATES[self.state] + kernel
        return " < ".join(str(frame) for frame in self.frames[:3]) or f"did not answer (state {self.state})"


def parse(text: str) -> list[Frame]:
    """The calls of the thread that took the signal (the main one), else of the oldest."""
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((head["current"].startswith("Current"), []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(Frame(frame["function"], frame["file"], int(frame["line"])))
    current = [frames for is_current, frames in threads if is_current]
    return (current or [frames for _, frames in threads] or [[]])[-1]


def ask(attempt: AttemptDir, nodes: int) -> list[ProcessStack]:
    """What the processes of every node are doing; of those nodes that answer within some seconds."""
    asked = round(time.time(), 3)
    write_json(attempt.explain_file, {"asked": asked})
    deadline = time.monotonic() + ALL_ANSWERS_S
    while True:
        answers = [of_content(content, asked) for content in stack_answers(attempt)]
        found = [answer for answer in answers if answer is not None]
        if len(found) >= nodes or time.monotonic() > deadline:
            return [stack for answer in found for stack in answer]
        time.sleep(_POLL_S)


def as_content(asked: float, stacks: Iterable[ProcessStack]) -> dict[str, object]:
    """A node's answer to what was asked then, for JSON."""
    return {"asked": asked, "processes": [dataclasses.asdict(stack) for stack in stacks]}


def of_content(content: dict[str, object], asked: float) -> list[ProcessStack] | None:
    """A node's answer; None where it is none to that question."""
    processes = content.get("processes")
    if content.get("asked") != asked or not isinstance(processes, list):
        return None
    return [
        ProcessStack(**{**process, "frames": [Frame(*frame) for frame in process["frames"]]}) for process in processes
    ]


def described(stacks: Sequence[ProcessStack]) -> list[str]:
    """A line per place in which processes of a kind are: those that cannot go on first, the most last."""
    lines: list[tuple[bool, int, str]] = []
    for kind, members in _by_kind(stacks).items():
        places: dict[object, list[ProcessStack]] = defaultdict(list)
        for stack in members:
            places[(stack.ill, stack.state if stack.ill else stack.doing)].append(stack)
        for found in places.values():
            few = len(found) <= len(members) / 2
            who = f" ({', '.join(f'{stack.host} pid {stack.pid}' for stack in found[:4])})" if few else ""
            line = f"{len(found)} of {len(members)} {kind}{who}: {found[0]}"
            lines.append((not found[0].ill, len(found), line))
    return [line for _, _, line in sorted(lines)]


def odd_nodes(stacks: Sequence[ProcessStack]) -> list[str]:
    """The one node whose processes cannot go on, or are elsewhere than most of their kind; none where it is not one."""
    ill = {stack.host for stack in stacks if stack.ill}
    if not ill:
        for members in _by_kind(stacks).values():
            places: dict[object, int] = defaultdict(int)
            for stack in members:
                places[stack.doing] += 1
            most = max(places, key=lambda place: places[place])
            if len(members) >= _CROWD and places[most] > len(members) / 2:
                ill |= {stack.host for stack in members if stack.doing != most}
    return sorted(ill) if len(ill) == 1 and len({stack.host for stack in stacks}) > 1 else []


def _by_kind(stacks: Iterable[ProcessStack]) -> dict[str, list[ProcessStack]]:
    kinds: dict[str, list[ProcessStack]] = defaultdict(list)
    for stack in stacks:
        kinds[stack.kind].append(stack)
    return kinds
