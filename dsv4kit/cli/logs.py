"""`dsv4kit logs`: the driver's log of a segment, or what the batch script said where there is no driver yet."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dsv4kit import hints
from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.errors import UserError
from dsv4kit.run import driver_log

if TYPE_CHECKING:
    from dsv4kit.run.directory import RunDir

_POLL_S = 0.5
# Some ten thousand lines; the log of a long segment has a hundred times that.
_SHOWN_BYTES = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "Show the log of a run's segment."
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    parser.add_argument("-f", dest="follow", action="store_true", default=None, help="as --follow")
    add_variables(parser, BY_VERB["logs"])


def run(args: argparse.Namespace) -> int:
    """Prints the log; with --follow what is added to it, over all segments, until the run is over."""
    from dsv4kit.cli.follow import phase_line
    from dsv4kit.cli.runs import chosen_name, open_run
    from dsv4kit.launch.state import StateReader

    run_dir, slurm = open_run(chosen_name(args))
    number = _segment_number(run_dir, args.segment)
    log = find_log(run_dir, number)
    if not args.follow:
        if log is None:
            raise UserError(f"segment {number} of {run_dir.name} has not started, there is no log yet")
        print(f"# {log}")
        for segment in StateReader(run_dir, slurm).read().segments:
            if segment.segment == number and segment.phase:
                print(f"# now, for {segment.phase_s:.0f} s: {phase_line(segment)}")
        with log.open("rb") as file:
            _to_the_end(file, run_dir, number, bool(args.all))
            _show(file)
        return 0
    reader, phase = StateReader(run_dir, slurm), ""
    shown: dict[Path, int] = {}
    while True:
        state = reader.read()
        over = state.over
        for segment in state.segments:
            if segment.phase and (line := f"# segment {segment.segment}: {phase_line(segment)}") != phase:
                phase = line
                print(line, flush=True)
        if log := find_log(run_dir, _segment_number(run_dir, args.segment)):
            if log not in shown:
                print(f"# {log}", flush=True)
            with log.open("rb") as file:
                if log in shown:
                    file.seek(shown[log])
                else:
                    _to_the_end(file, run_dir, _segment_number(run_dir, args.segment), bool(args.all))
                _show(file)
                shown[log] = file.tell()
        if over:
            return 0
        time.sleep(_POLL_S)


def _to_the_end(log: BinaryIO, run: RunDir, segment: int, everything: bool) -> None:
    """Goes to where the last megabyte of lines begins, and says so, unless everything is wanted."""
    size = log.seek(0, os.SEEK_END)
    log.seek(0)
    if everything or size <= _SHOWN_BYTES:
        return
    log.seek(size - _SHOWN_BYTES)
    log.readline()
    whole = hints.command("logs", RUN=run.name, SEGMENT=segment, ALL=1)
    print(f"# the last {_SHOWN_BYTES / 1e6:.0f} of {size / 1e6:.0f} MB; `{whole}` shows all")


def _show(log: BinaryIO) -> None:
    """The rest of the log; its colours are for terminals."""
    sys.stdout.flush()
    if sys.stdout.isatty():
        shutil.copyfileobj(log, sys.stdout.buffer)
    else:
        for line in log:
            text = line.decode(errors="surrogateescape")
            sys.stdout.buffer.write(driver_log.plain(text).encode(errors="surrogateescape"))
    sys.stdout.flush()


def find_log(run: RunDir, segment: int) -> Path | None:
    """The log that says most about the segment: the driver's, else the batch script's."""
    place = run.segment(segment)
    candidates = [*(attempt.driver_log for attempt in reversed(place.attempts())), place.log]
    return next((path for path in candidates if path.is_file() and path.stat().st_size), None)


def _segment_number(run: RunDir, wanted: str | None) -> int:
    """The segment asked for, or the latest one with a log (else the first)."""
    numbers = [link.segment for link in run.chain()]
    if wanted is not None:
        if wanted not in map(str, numbers):
            raise UserError(f"SEGMENT={wanted!r}: {run.name} has segments {min(numbers)} to {max(numbers)}")
        return int(wanted)
    return next((number for number in reversed(numbers) if find_log(run, number)), min(numbers, default=1))
