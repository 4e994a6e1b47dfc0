"""`python -m benchmarks.bringup`: a table per number of nodes; exit status 1 where the kit is behind.

One machine plays all nodes: from four nodes on its CPUs decide, and only ratios within one run tell anything.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.bringup.bringup_driver import busy_s
from benchmarks.bringup.methods import METHODS, TIMES, Job, Place, found
from dsv4kit.launch.slurm import Slurm
from dsv4kit.sandbox.cluster import Sandbox, SandboxSpec
from dsv4kit.sandbox.runtime import runtime_python
from dsv4kit.sandbox.spec import ROOT_VARIABLE

FLOOR, OURS = "F", "kit"
# The most that the kit may take of what the bare starts take, from this number of nodes on: at two, whether Ray's own
# sleeps of 1 and 2 s come in is chance.
RATIO, FROM_NODES = 0.95, 4
_LIMIT_S = 600.0
_IDLE_S = 1.0
_IDLE_LIMIT_S = 120.0


def main() -> int:
    """Measures what the arguments ask for."""
    asked = _arguments()
    python = runtime_python()
    behind = []
    with tempfile.TemporaryDirectory(prefix="bringup-") as name:
        scratch = Path(name)
        os.environ[ROOT_VARIABLE] = str(scratch / "sandboxes")
        for nodes in asked.nodes:
            sandbox = Sandbox.up(SandboxSpec(name="bringup", nodes=nodes, gpus_per_node=1))
            try:
                sandbox.share([scratch, python.parents[1], Path(__file__).parents[2]])
                medians = _compare(nodes, asked.methods, asked.repeats, scratch, python, Slurm(sandbox.client_env))
            finally:
                sandbox.down(wipe=True)
            behind += _behind(nodes, medians)
    for line in behind:
        print(line)
    return 1 if behind else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bringup", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    return parser.parse_args()


def _compare(
    nodes: int, methods: list[str], repeats: int, scratch: Path, python: Path, slurm: Slurm
) -> dict[str, dict[str, float]]:
    """The median of each figure per method. They take turns, so that what else the machine does meets all of them."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for turn in range(repeats):
        for name in methods:
            directory = scratch / f"{nodes}-{name}-{turn}"
            directory.mkdir()
            runs[name].append(_measure(name, Place(directory, nodes, python, slurm)))
    medians = {
        name: {key: statistics.median(run[key] for run in done) for key in done[0]} for name, done in runs.items()
    }
    _show(nodes, medians, runs)
    return medians


def _measure(name: str, place: Place) -> dict[str, float]:
    """One job of that method, from an idle machine; its CPU time is the whole machine's."""
    _wait_idle()
    job = METHODS[name][1](place)
    _wait(job.log.exists, f"{name}: no job after")
    before = busy_s()
    try:
        _wait(place.out.exists, f"{name}: no driver after")
    finally:
        _end(job, place.slurm)
    result = found(job)
    if result["nodes"] != place.nodes:
        raise RuntimeError(f"{name}: the driver found {result['nodes']} of {place.nodes} nodes")
    return {**result, "cpu_s": result.pop("busy_s") - before}


def _wait_idle() -> None:
    """Until the CPUs are nine tenths idle for a second; goes on after two minutes, as the machine is."""
    deadline = time.monotonic() + _IDLE_LIMIT_S
    while time.monotonic() < deadline:
        before = busy_s()
        time.sleep(_IDLE_S)
        if busy_s() - before < 0.1 * (os.cpu_count() or 1) * _IDLE_S:
            return
    print(f"the machine was busy for {_IDLE_LIMIT_S:.0f} s; measured as it is", file=sys.stderr)


def _wait(until: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not until():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{otherwise} {_LIMIT_S:.0f} s")
        time.sleep(0.05)


def _end(job: Job, slurm: Slurm) -> None:
    """The kit's job would end by itself; the others' head and workers would not."""
    slurm.run("scancel", job.job_id)
    _wait(lambda: not slurm.run("squeue", "-h", "-o", "%i").split(), "the job was not over after")


def _show(nodes: int, medians: dict[str, dict[str, float]], runs: dict[str, list[dict[str, float]]]) -> None:
    heads = [key.removesuffix("_s").replace("_", " ") for key in (*TIMES, "cpu_s")]
    print(f"\n{nodes} nodes; seconds since the batch script began, medians; ratio: first line, to {FLOOR}")
    print(f"{'':4} {'':48}" + "".join(f"{head:>12}" for head in heads) + f"{'ratio':>8}  first line of each run")
    for name, median in medians.items():
        cells = "".join(f"{median[key]:>12.1f}" if key in median else f"{'':12}" for key in (*TIMES, "cpu_s"))
        ratio = f"{_ratio(medians, name):>8.2f}" if FLOOR in medians else f"{'':8}"
        each = ", ".join(f"{run['first_line_s']:.1f}" for run in runs[name])
        print(f"{name:4} {METHODS[name][0]:48}{cells}{ratio}  {each}", flush=True)


def _ratio(medians: dict[str, dict[str, float]], name: str, to: str = FLOOR) -> float:
    return medians[name]["first_line_s"] / medians[to]["first_line_s"]


def _behind(nodes: int, medians: dict[str, dict[str, float]]) -> list[str]:
    """What the kit does not keep of its promises."""
    if OURS not in medians:
        return []
    late = [
        f"{nodes} nodes: behind {name}"
        for name in medians
        if name not in (OURS, FLOOR) and _ratio(medians, OURS, name) > 1
    ]
    if FLOOR in medians and nodes >= FROM_NODES and (ratio := _ratio(medians, OURS)) > RATIO:
        late.append(f"{nodes} nodes: {ratio:.2f} of {FLOOR}, more than {RATIO}")
    return late


if __name__ == "__main__":
    sys.exit(main())
