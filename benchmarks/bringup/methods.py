"""The methods that are compared: how each gets a job into the queue whose driver writes what it found."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.config.loading import Override, load_settings, load_site
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.submission import Submission
from dsv4kit.run.directory import RunDir
from dsv4kit.run.phases import BRING_UP, parse

HERE = Path(__file__).parent
# In the order in which they come: node 0's agent (the kit's alone) begins, the head is a node of Ray, all nodes are,
# the driver's process begins, the driver has joined.
TIMES = ("agent_s", "head_alive_s", "all_alive_s", "process_s", "first_line_s")


@dataclass(frozen=True)
class Job:
    """A submitted job: Slurm makes `log` as it starts the batch script; the driver makes `out`; the kit has `marks`."""

    job_id: str
    log: Path
    out: Path
    marks: Path | None = None


@dataclass(frozen=True)
class Place:
    """Where a measurement happens: a directory that all nodes see, and the runtime's Python."""

    directory: Path
    nodes: int
    python: Path
    slurm: Slurm

    @property
    def out(self) -> Path:
        """What the driver writes."""
        return self.directory / "found.json"


Method = Callable[[Place], Job]


def submission(place: Place) -> Submission:
    """The run of the kit; what its nodes bring to Ray is what they bring in every method."""
    run = RunDir(place.directory / "run")
    settings: Mapping[str, object] = {
        "recipe.module": "bringup_driver",
        "env.PYTHONPATH": f"{run.kit}:{HERE}",
        "env.BRINGUP_OUT": str(place.out),
        "hardware.min_memory_gib": 0.1,
        "schedule.nodes": place.nodes,
        "schedule.steps": 1,
        "schedule.segment_steps": 1,
        "schedule.spare_segments": 0,
        "watch.restarts": 0,
    }
    resolved = load_settings("cpu", "tiny", "grpo", [Override(key, value, "bench") for key, value in settings.items()])
    return Submission(resolved, load_site("sandbox"), run, place.slurm, str(place.python), "/m", "/d")


def kit(place: Place) -> Job:
    """A run as `dsv4kit submit` would submit it: frozen kit, submitit, agents, preflight, lease, outcome."""
    made = submission(place)
    made.submit(lambda line: None)
    (link,) = made.run.chain()
    segment = made.run.segment(1)
    return Job(link.job_id, segment.log, place.out, segment.attempt(0).phases_file)


def script(name: str, poll_s: int = 0) -> Method:
    """One of the methods in `methods.sh`."""

    def submit(place: Place) -> Job:
        log, ray = place.directory / "slurm.log", submission(place).node_spec().ray
        env = {
            "BRINGUP_DIR": str(HERE),
            "BRINGUP_BIN": str(place.python.parent),
            "BRINGUP_OUT": str(place.out),
            "BRINGUP_CPUS": str(ray.cpus),
            "BRINGUP_GPUS": str(ray.gpus),
            "BRINGUP_STORE_BYTES": str(ray.object_store_bytes),
            "BRINGUP_POLL_S": str(poll_s),
        }
        lines = ["#!/bin/bash", *(f"export {key}={shlex.quote(value)}" for key, value in env.items())]
        batch = place.directory / "job.sbatch"
        batch.write_text("\n".join([*lines, f'exec bash "$BRINGUP_DIR/methods.sh" {name}', ""]))
        options = [f"--nodes={place.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={ray.cpus}"]
        options += [f"--gpus-per-node={ray.gpus}", "--exclusive", f"--output={log}", "--chdir=/", "--time=30"]
        job_id = place.slurm.run("sbatch", "--parsable", *options, str(batch)).split()[-1]
        return Job(job_id, log, place.out)

    return submit


METHODS: dict[str, tuple[str, Method]] = {
    "F": ("`ray start` on all nodes at once, polled for free", script("bare")),
    "kit": ("dsv4kit", kit),
    "P2": ("head, then workers, `ray status` every 2 s", script("polled", 2)),
    "P10": ("head, then workers, `ray status` every 10 s", script("polled", 10)),
    "U": ("one srun after the other, fixed sleeps", script("sleeps")),
}


def found(job: Job) -> dict[str, float]:
    """What the driver wrote; its times in seconds since the batch script began."""
    raw = json.loads(job.out.read_text())
    if job.marks:
        marks, _ = parse(job.marks.read_bytes().splitlines())
        raw["agent_s"] = next(mark.time for mark in marks if mark.phase == BRING_UP)
    began = started_s(job.log)
    return {key: value - began if key in TIMES else value for key, value in raw.items()}


def started_s(log: Path) -> float:
    """When Slurm made the job's log, right before the script's first line. ValueError where the file system forgets."""
    born = subprocess.run(["stat", "--format=%.9W", "--", log], capture_output=True, text=True, check=True)
    if float(born.stdout) <= 0:
        raise ValueError(f"{os.fspath(log)}: this file system keeps no times of birth")
    return float(born.stdout)
