"""`dsv4kit logs`: the driver's log of a segment, or what the batch script said where there is no driver yet."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from dsv4kit import hints
from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.errors import UserError, nearest
from dsv4kit.run import driver_log, node_files

if TYPE_CHECKING:
    from dsv4kit.run.directory import AttemptDir, RunDir

_POLL_S = 0.5
# Some ten thousand lines; the log of a long segment has a hundred times that.
_SHOWN_BYTES = 1_000_000
DRIVER, SLURM, RAY, AGENT = KINDS = ("driver", "slurm", "ray", "agent")
# 2026-01-31 14:30:00 with T, a comma or milliseconds; without the year as vLLM and glog write it.
_STAMP = re.compile(rb"(?:(20\d\d)-)?(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)")


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
    what = args.what or DRIVER
    wanted = LogFilter.asked(args.tail, args.grep, args.since)
    number = _segment_number(run_dir, args.segment)
    logs = find_logs(run_dir, number, what, args.node)
    if not args.follow:
        if not logs:
            raise UserError(f"segment {number} of {run_dir.name} {_nothing(what, args.node)}")
        if args.json:
            shown = [{"file": str(log), "lines": [_text(line) for line in wanted.lines(log)]} for log in logs]
            print(json.dumps(shown, indent=1))
            return 0
        for log in logs:
            print(f"# {log}")
            if log == logs[0]:
                for segment in StateReader(run_dir, slurm).read().segments:
                    if segment.segment == number and segment.phase:
                        print(f"# now, for {segment.phase_s:.0f} s: {phase_line(segment)}")
            if wanted.everything:
                with log.open("rb") as file:
                    _to_the_end(file, run_dir, number, what, bool(args.all))
                    _show(file)
            else:
                _show(wanted.lines(log))
        return 0
    for name in ("tail", "since", "json"):
        if getattr(args, name):
            raise UserError(f"{name.upper()}: does not go together with FOLLOW")
    reader, phase = StateReader(run_dir, slurm), ""
    shown_until: dict[Path, int] = {}
    while True:
        state = reader.read()
        over = state.over
        for segment in state.segments:
            if segment.phase and (line := f"# segment {segment.segment}: {phase_line(segment)}") != phase:
                phase = line
                print(line, flush=True)
        for log in find_logs(run_dir, _segment_number(run_dir, args.segment), what, args.node):
            if log not in shown_until:
                print(f"# {log}", flush=True)
            with log.open("rb") as file:
                if log in shown_until:
                    file.seek(shown_until[log])
                elif wanted.everything:
                    _to_the_end(file, run_dir, _segment_number(run_dir, args.segment), what, bool(args.all))
                _show(file if wanted.everything else filter(wanted.grepped, file))
                shown_until[log] = file.tell()
        if over:
            return 0
        time.sleep(_POLL_S)


def _to_the_end(log: BinaryIO, run: RunDir, segment: int, what: str, everything: bool) -> None:
    """Goes to where the last megabyte of lines begins, and says so, unless everything is wanted."""
    size = log.seek(0, os.SEEK_END)
    log.seek(0)
    if everything or size <= _SHOWN_BYTES:
        return
    log.seek(size - _SHOWN_BYTES)
    log.readline()
    kind = {} if what == DRIVER else {"WHAT": what}
    whole = hints.command("logs", RUN=run.name, SEGMENT=segment, **kind, ALL=1)
    print(f"# the last {_SHOWN_BYTES / 1e6:.0f} of {size / 1e6:.0f} MB; `{whole}` shows all")


def _nothing(what: str, node: str | None) -> str:
    if what == DRIVER and node is None:
        return "has not started, there is no log yet"
    return f"has no log of {what}" + (f" from the node {node}" if node else "")


def _text(line: bytes) -> str:
    return driver_log.plain(line.decode(errors="replace")).rstrip("\r\n")


def _plain(line: bytes) -> bytes:
    return driver_log.plain(line.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def _show(log: Iterable[bytes]) -> None:
    """The lines of the log; its colours are for terminals."""
    sys.stdout.flush()
    if sys.stdout.isatty():
        sys.stdout.buffer.writelines(log)
    else:
        sys.stdout.buffer.writelines(map(_plain, log))
    sys.stdout.flush()


class LogFilter(NamedTuple):
    """Which lines of a log are wanted: the last `tail`, those in which `grep` is found, those since a time."""

    tail: int | None
    grep: re.Pattern[bytes] | None
    since: float | None

    @classmethod
    def asked(cls, tail: str | None, grep: str | None, since: str | None) -> LogFilter:
        """As a user writes it; UserError for what means nothing."""
        if tail is not None and not (tail.isdecimal() and len(tail) < 10):
            raise UserError(f"TAIL={tail!r}: not a number of lines")
        try:
            pattern = re.compile(os.fsencode(grep)) if grep is not None else None
        except re.error as error:
            raise UserError(f"GREP={grep!r}: no regular expression: {error}") from None
        return cls(int(tail) if tail is not None else None, pattern, _moment(since) if since is not None else None)

    @property
    def everything(self) -> bool:
        """Whether no line is left out."""
        return self == (None, None, None)

    def grepped(self, line: bytes) -> bool:
        """Whether the pattern is found in it, whatever its colours."""
        return self.grep is None or self.grep.search(_plain(line)) is not None

    def lines(self, log: Path) -> list[bytes]:
        """Those of the file; with a time, lines without one of their own go with the line before."""
        found: deque[bytes] = deque(maxlen=self.tail)
        told, late = False, False
        with log.open("rb") as file:
            day = time.localtime(os.fstat(file.fileno()).st_mtime)
            for line in file:
                if self.since is not None and (stamp := _stamp(line, day)) is not None:
                    told, late = True, stamp >= self.since
                if (self.since is None or late) and self.grepped(line):
                    found.append(line)
        if self.since is not None and not told:
            raise UserError(f"SINCE: no line of {log} begins with a time; TAIL= shows its last lines")
        return list(found)


def _moment(text: str) -> float:
    """`10m` ago, `14:30` today, or a date with a time; seconds since the epoch, by this machine's clock."""
    if ago := re.fullmatch(r"(\d{1,6})([smhd])", text):
        return time.time() - int(ago[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[ago[2]]
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            clock = dt.time.fromisoformat(text.zfill(5) if text.count(":") == 1 else text.zfill(8))
            return dt.datetime.combine(dt.date.today(), clock).timestamp()
        return dt.datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UserError(f"SINCE={text!r}: neither 10m, 2h, 14:30 nor 2026-01-31T14:30") from None


def _stamp(line: bytes, day: time.struct_time) -> float | None:
    """The time a line carries near its beginning: a date with a time, or `MM-DD hh:mm:ss` as vLLM writes it."""
    found = _STAMP.search(_plain(line[:200]))
    if not found:
        return None
    year = int(found[1]) if found[1] else day.tm_year
    try:
        clock = [int(part) for part in (found[2], found[3], found[4], found[5], found[6])]
        return dt.datetime(year, *clock).timestamp()  # type: ignore[arg-type]
    except ValueError:
        return None


def find_logs(run: RunDir, segment: int, what: str, node: str | None) -> list[Path]:
    """The logs of one kind, of the segment's latest attempt that has any, that are not empty; of one node if named."""
    if what not in KINDS:
        raise UserError(f"WHAT={what!r}: allowed: {', '.join(KINDS)}{nearest(what, KINDS)}")
    if what in (DRIVER, SLURM) and node is not None:
        raise UserError(f"NODE={node!r}: there is one log of {what}; WHAT=ray and WHAT=agent have some per node")
    place = run.segment(segment)
    if what == DRIVER:
        log = find_log(run, segment)
        return [log] if log else []
    if what == SLURM:
        return [place.log] if _there(place.log) else []
    for attempt in reversed(place.attempts()):
        by_host = {name.host: name for name in node_files.hosts(attempt)}
        if node is not None and node not in by_host and by_host:
            raise UserError(f"NODE={node!r}: the nodes are {', '.join(sorted(by_host))}{nearest(node, by_host)}")
        hosts = [files for host, files in sorted(by_host.items()) if node in (None, host)]
        logs = [path for files in hosts for path in (_ray(attempt, files) if what == RAY else _agent(files))]
        if found := [path for path in logs if _there(path)]:
            return found
    return [place.log] if what == AGENT and node is None and _there(place.log) else []


def _ray(attempt: AttemptDir, files: node_files.NodeFiles) -> list[Path]:
    kept = attempt.ray_logs(files.host)
    return [files.ray_log, *(path for path in sorted(kept.rglob("*")) if path.is_file() and not path.is_symlink())]


def _agent(files: node_files.NodeFiles) -> list[Path]:
    return [files.setup_log, files.torchrun_log]


def _there(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def find_log(run: RunDir, segment: int) -> Path | None:
    """The log that says most about the segment: the driver's, else the batch script's."""
    place = run.segment(segment)
    candidates = [*(attempt.driver_log for attempt in reversed(place.attempts())), place.log]
    return next((path for path in candidates if _there(path)), None)


def _segment_number(run: RunDir, wanted: str | None) -> int:
    """The segment asked for, or the latest one with a log (else the first)."""
    numbers = [link.segment for link in run.chain()]
    if wanted is not None:
        if wanted not in map(str, numbers):
            raise UserError(f"SEGMENT={wanted!r}: {run.name} has segments {min(numbers)} to {max(numbers)}")
        return int(wanted)
    return next((number for number in reversed(numbers) if find_log(run, number)), min(numbers, default=1))
