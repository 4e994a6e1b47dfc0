"""What a build is doing, with the time since it began, and its programs' whole output in a log file."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dsv4kit.errors import UserError

Say = Callable[[str], None]

# `STEP 3/14: RUN ...` of buildah and podman, `#7 [stage 3/14] RUN ...` of docker.
_STEP = re.compile(r"(?:\[\d+/\d+\] )?STEP (\d+)/(\d+): (.*)|#\d+ \[(?:\S+ +)?(\d+)/(\d+)\] (.*)")
_WIDTH = 80
# A download of gigabytes says nothing for minutes.
_SILENCE_S = 60.0


class Progress:
    """Lines for a person: `image: 2 min 5 s: what happens now`."""

    def __init__(self, say: Say) -> None:
        self._say, self._begun = say, time.monotonic()

    def __call__(self, text: str) -> None:
        self._say(f"image: {duration(time.monotonic() - self._begun)}: {text}")


def duration(seconds: float) -> str:
    """`5 s`, `2 min 5 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def step_of(line: str) -> str | None:
    """`3/14 RUN ...` of a line in which an engine says that it begins a step."""
    found = _STEP.match(line)
    if not found:
        return None
    number, count, what = found.groups()[:3] if found[1] else found.groups()[3:]
    what = " ".join(what.split())
    return f"{number}/{count} {what if len(what) <= _WIDTH else what[: _WIDTH - 3] + '...'}"


def run_logged(
    argv: Sequence[str], log: Path, progress: Progress, env: Mapping[str, str], what: str, silence_s: float = _SILENCE_S
) -> None:
    """Runs a program to its end, its output in `log`, its steps told. Raises UserError with its last words.

    Whatever ends this (an error, Ctrl-C) ends the program first.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    last: deque[str] = deque(maxlen=30)
    step, told = "", time.monotonic()
    step_since = told
    with (
        log.open("ab") as file,
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(env)
        ) as process,
        selectors.DefaultSelector() as ready,
    ):
        assert process.stdout is not None
        ready.register(process.stdout, selectors.EVENT_READ)
        unfinished = b""
        try:
            while True:
                heard = ready.select(max(0.0, told + silence_s - time.monotonic()))
                if time.monotonic() - told >= silence_s:
                    told = time.monotonic()
                    progress(f"{what} {step}: still at it, {duration(told - step_since)}")
                if not heard:
                    continue
                chunk = os.read(process.stdout.fileno(), 65536)
                file.write(chunk)
                file.flush()
                *lines, unfinished = (unfinished + chunk).split(b"\n")
                for text in (line.decode(errors="replace").rstrip() for line in lines):
                    if text:
                        last.append(text)
                    if (begun := step_of(text)) and begun != step:
                        step, step_since = begun, time.monotonic()
                        told = step_since
                        progress(f"{what} {step}")
                if not chunk:
                    break
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status != 0:
        words = [*last, unfinished.decode(errors="replace")]
        where = f" at step {step}" if step else ""
        raise UserError(f"{what} failed{where}: {reason(words)} (all of its output: {log})")


def reason(lines: Sequence[str]) -> str:
    """Of a program's last lines the one that says why it failed."""
    said = [line.strip() for line in lines if line.strip()]
    # The engine's own last line only says which command ended with which status.
    told = [
        line for line in said if re.search(r"error|fatal|cannot|no such|denied|unable|not found", line, re.IGNORECASE)
    ]
    own = [
        line
        for line in told
        if not re.search(r"exit(ed with)? (status|code)|building at STEP|exit status|previous errors", line)
    ]
    return (own or told or said or ["no message"])[-1]
