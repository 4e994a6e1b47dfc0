"""`dsv4kit runs`: all runs, a line each; and what the verbs about one run share: the run and its Slurm."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.errors import UserError, nearest
from dsv4kit.text_table import aligned, coloured, duration, plain, terminal_width

if TYPE_CHECKING:
    from dsv4kit.launch.overview import Overview
    from dsv4kit.launch.slurm import JobState, Slurm
    from dsv4kit.run.directory import RunDir

_COLUMNS = ("run", "state", "steps", "s/step", "left", "last", "node-h", "lost", "age")
_SORTS: dict[str, Callable[[Overview], tuple[bool, float | str]]] = {
    "age": lambda one: (False, one.age_s),
    "name": lambda one: (False, one.run),
    "state": lambda one: (False, one.state),
    "left": lambda one: (one.eta_s is None, one.eta_s or 0.0),
    "node-hours": lambda one: (False, -one.node_hours),
    "lost": lambda one: (False, -one.node_hours_lost),
    "reward": lambda one: (one.value is None, -(one.value or 0.0)),
}
STATES = ("waiting", "running", "finished", "cancelled", "stopped", "incomplete", "unknown", "damaged")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "All runs, newest first: state, steps, rate, time left, last reward or loss, node-hours, age."
    add_variables(parser, BY_VERB["runs"])


def run(args: argparse.Namespace) -> int:
    """Prints the list."""
    found = [one for one in _overviews() if _wanted(one, args.state, args.match)]
    by = args.sort or "age"
    if by not in _SORTS:
        raise UserError(f"SORT={by!r}: allowed: {', '.join(_SORTS)}{nearest(by, _SORTS)}")
    found.sort(key=_SORTS[by])
    if args.json:
        print(json.dumps([one.as_dict() for one in found], indent=1))
    elif found:
        print(coloured(runs_table(found, terminal_width())))
    else:
        from dsv4kit import hints
        from dsv4kit.launch.run_dir import runs_root

        print(f"no run in {runs_root()} that is asked for; `{hints.command('submit', HW='cpu')}` starts one")
    return 0


def _wanted(one: Overview, state: str | None, match: str | None) -> bool:
    import fnmatch

    states = (state or "").split(",") if state else list(STATES)
    for name in states:
        if name not in STATES:
            raise UserError(f"STATE={name!r}: allowed: {', '.join(STATES)}{nearest(name, STATES)}")
    return one.state in states and fnmatch.fnmatchcase(one.run, match or "*")


def _overviews() -> list[Overview]:
    """All runs; each Slurm is asked once."""
    from dsv4kit.launch.overview import overview, site_name
    from dsv4kit.launch.run_dir import runs_root
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.run.directory import runs_below

    by_place: dict[bool, list[RunDir]] = {}
    for one in runs_below(runs_root()):
        by_place.setdefault(site_name(one) == "sandbox", []).append(one)
    found, now = [], time.time()
    for in_sandbox, runs in by_place.items():
        jobs: dict[str, JobState] | None = None
        no_answer = ""
        try:
            jobs = (sandbox_slurm() if in_sandbox else Slurm()).all_states()
        except UserError as error:
            no_answer = str(error)
        found += [overview(one, jobs, no_answer, now) for one in runs]
    return found


def runs_table(found: Sequence[Overview], width: int | None) -> str:
    """A line per run; where the terminal is narrow, the last columns give way."""
    rows = [_COLUMNS, *(_line(one) for one in found)]
    columns = len(_COLUMNS)
    right = (2, 3, 5, 6, 7)
    while True:
        lines = aligned([row[:columns] for row in rows], right=right)
        if width is None or columns <= 3 or max(map(len, lines)) <= width:
            return "\n".join(line if width is None else line[:width] for line in lines)
        columns -= 1


def _line(one: Overview) -> tuple[str, ...]:
    if one.damaged:
        return (one.run, "damaged", *[""] * 6, duration(one.age_s))
    return (
        plain(one.run),
        one.state,
        f"{max(one.step or 0, one.saved_step or 0)}/{one.total_steps}",
        "" if one.step_s is None else f"{one.step_s:.1f}",
        "" if one.eta_s is None else duration(one.eta_s),
        "" if one.value is None else f"{one.value:.3f}",
        f"{one.node_hours:.1f}",
        f"{one.node_hours_lost:.1f}",
        duration(one.age_s),
    )


def chosen_name(args: argparse.Namespace) -> str | None:
    """The run's name as an argument or as --run; None if neither was given."""
    if args.name is not None and args.run is not None and args.name != args.run:
        raise UserError(f"RUN={args.run!r}: another run, {args.name!r}, is named too")
    name: str | None = args.run if args.name is None else args.name
    return name


def open_run(name: str | None) -> tuple[RunDir, Slurm]:
    """The run of that name (the newest if None), and its cluster's client commands."""
    from dsv4kit.launch.run_dir import find_run, read_record
    from dsv4kit.launch.slurm import Slurm

    run = find_run(name)
    return run, sandbox_slurm() if read_record(run)["site"].get("name") == "sandbox" else Slurm()


def sandbox_slurm() -> Slurm:
    """The sandbox's client commands; while it is down they say so."""
    from dsv4kit import hints
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.sandbox.cluster import Sandbox

    running = Sandbox.load()
    # Only root sees whether the daemons run.
    if running is None or (os.geteuid() == 0 and not running.alive):
        return Slurm(down=f"the sandbox is down; `{hints.command('sandbox up')}` starts it")
    return Slurm(running.client_env)
