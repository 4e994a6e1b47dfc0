"""Runs and checkpoints of some size: a chain submitted, a long run shown, a checkpoint of many ranks inspected."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.bench_start import KIT, command
from benchmarks.measure import Benchmark
from dsv4kit.checkpoint.inspection import inspect
from dsv4kit.config.loading import Override, load_settings, load_site
from dsv4kit.launch.slurm import JobState, Slurm
from dsv4kit.launch.state import read_state
from dsv4kit.launch.submission import Submission
from dsv4kit.run import ends, outcome
from dsv4kit.run.directory import ChainLink, RunDir
from dsv4kit.run.files import write_json, write_text

TESTS = Path(__file__).parents[1] / "tests" / "unit"
# sbatch and squeue that answer at once, for a queue that is a directory.
CLIENT = """#!/bin/sh
cd "$(dirname "$0")/jobs" || exit 1
case $0 in
  *sbatch)
    for script; do :; done
    after=$(echo "$*" | sed -n 's/.*--dependency=\\([^ ]*\\).*/\\1/p')
    number=$(($(cat ../number) + 1)); echo $number > ../number
    echo "PENDING|$after|$(sed -n 's/^#SBATCH --job-name=//p' "$script")" > $number; echo $number ;;
  *squeue)
    case "$*" in *" -j "*) job=${*##* -j }; job=${job%% *}; echo "dsv4kit|$job|$(cat "$job")" ;; esac ;;
esac
"""


def benchmarks(scratch: Path) -> Iterator[Benchmark]:
    """Each makes what it needs below `scratch`."""
    yield Benchmark("submit a chain of 25 segments (Slurm stubbed)", submitter(scratch / "chain"), 3.0, runs=5)
    yield Benchmark(
        "submit a chain of 300 segments (Slurm stubbed)", submitter(scratch / "longest chain", 300), 20.0, runs=1
    )
    for segments, promise_s in ((100, 0.4), (300, 1.2)):
        run = long_run(scratch / f"long{segments}", segments, steps=40)
        name = f"status of {segments} segments x 40 steps"
        yield Benchmark(name, lambda run=run: read_state(run, NoQueue()), promise_s, runs=5)  # type: ignore[misc]
    many = scratch / "many"
    for number in range(50):
        long_run(many / f"run{number}", segments=5, steps=40)
    yield Benchmark("runs, 50 of 5 segments", command(KIT, "runs", DSV4KIT_RUNS=str(many)), 0.4, runs=5)
    made = tests_module("report_runs").make(scratch, "reported", segments=50, steps=40, nodes=64, sample_rows=200)
    report = command(KIT, "report", made.name, DSV4KIT_RUNS=str(scratch))
    yield Benchmark("report, 2,000 steps on 64 nodes", report, 5.0, runs=2)
    trees = tests_module("checkpoint_trees")
    fsdp, megatron = scratch / "fsdp", scratch / "megatron"
    trees.ppo_fsdp(fsdp, 40, world=512)
    step = trees.ppo_megatron(megatron, 40, ("model", "optimizer", "extra"), hf_model=False)
    for content in ("model", "optimizer"):
        trees.dist_ckpt(step / "actor" / content / "dist_ckpt", ranks=512)
    for name, directory in [("FSDP", fsdp), ("Megatron", megatron)]:
        yield Benchmark(f"inspect a checkpoint of 512 ranks, {name}", inspection(directory), runs=5)


def submitter(root: Path, segments: int = 25) -> Callable[[], object]:
    """Submits another run of so many segments at each call, to clients that answer at once."""
    (root / "jobs").mkdir(parents=True)
    (root / "number").write_text("0")
    for name in ("sbatch", "squeue", "scancel"):
        (root / name).write_text(CLIENT)
        (root / name).chmod(0o755)
    resolved = load_settings("cpu", "tiny", "grpo", [Override("schedule.steps", 4 * segments, "bench")])
    assert resolved.settings.schedule.segment_steps == 4
    slurm = Slurm({"PATH": f"{root}:/usr/bin:/bin"})
    numbers = itertools.count(1)

    def submit() -> None:
        run = RunDir(root / "runs" / f"run{next(numbers)}")
        Submission(resolved, load_site("sandbox"), run, slurm, sys.executable, "/m", "/d").submit(lambda line: None)
        assert len(run.chain()) == segments + 2  # two of them spare

    return submit


class NoQueue(Slurm):
    """A queue that has forgotten every job."""

    def states(self, job_ids: Iterable[str], job_name: str | None = None) -> dict[str, JobState]:
        """None."""
        return {}


def long_run(directory: Path, segments: int, steps: int) -> RunDir:
    """A finished run as its nodes would have left it."""
    run = RunDir(directory)
    total = segments * steps
    write_json(run.node_spec_file, {"checkpoint_dir": str(run.path / "checkpoints"), "total_steps": total})
    write_text(run.path / "run.yaml", "run: long\n")
    write_text(run.path / "checkpoints" / "latest_checkpointed_iteration.txt", str(total))
    run.save_chain([ChainLink(number, str(1000 + number)) for number in range(1, segments + 1)])
    # Some 60 metrics a step, as verl logs.
    others = {f"timing_s/part{number}": 0.5 for number in range(60)}
    for number in range(1, segments + 1):
        start = (number - 1) * steps
        attempt = run.segment(number).path / "attempt-0"
        write_json(attempt / "plan.json", {"start": start, "target": start + steps})
        marks = [("bring-up", 10.0), ("import", 17.0), ("steps", 90.0)]
        _lines(attempt / "phases.jsonl", [{"phase": phase, "time": time} for phase, time in marks])
        made = range(start + 1, start + steps + 1)
        _lines(
            attempt / "metrics.jsonl",
            [
                {"step": step, "data": {"training/global_step": step, "critic/score/mean": 0.5, **others}}
                for step in made
            ],
        )
        outcome.save(
            outcome.Outcome(
                segment=number,
                attempt=0,
                job_id=str(1000 + number),
                start=start,
                target=start + steps,
                reached=start + steps,
                end=ends.COMPLETED,
                next="continue",
                reason="",
                ended=100.0,
            ),
            run.segment(number),
        )
    return run


def _lines(path: Path, rows: Iterable[dict[str, object]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def tests_module(name: str) -> Any:
    """A module of the tests that writes checkpoints or runs as verl and the nodes do."""
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pickle looks for the classes of what it writes
    spec.loader.exec_module(module)
    return module


def inspection(directory: Path) -> Callable[[], object]:
    """Looks at all of it, and has to find it complete."""

    def look() -> None:
        state = inspect(directory)
        assert len(state.complete) == 1, state.steps

    return look
