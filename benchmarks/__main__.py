"""`python -m benchmarks`: a line per promise: median, spread, and the promise."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsv4kit.config.loading import Override, load_settings, load_site
from dsv4kit.image import render as dockerfiles
from dsv4kit.image import stack
from dsv4kit.launch.render import SegmentScript, environment
from dsv4kit.run.directory import RunDir
from dsv4kit.verl_keys import compose, overrides

KIT = Path(sys.executable).with_name("dsv4kit")


def seconds(work: Callable[[], object], runs: int) -> list[float]:
    """Wall times of `runs` runs, after one that does not count."""
    work()
    times = []
    for _ in range(runs):
        since = time.perf_counter()
        work()
        times.append(time.perf_counter() - since)
    return times


def show(name: str, times: list[float], promise: str) -> None:
    """One line."""
    middle, least, most = statistics.median(times), min(times), max(times)
    print(f"{name:44} {middle * 1000:8.0f} ms   ({least * 1000:.0f} to {most * 1000:.0f})   {promise}", flush=True)


def main() -> None:
    """All benchmarks that need no cluster."""
    settings = load_settings("cpu", "tiny", "grpo").settings
    script = SegmentScript(settings, load_site("sandbox"), RunDir(Path("/shared/runs/x")), 1)
    pairs = overrides.build(settings, run_name="x", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/r/kit")
    show("python -c pass", seconds(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True), 11), "for scale")
    show(
        "dsv4kit --help",
        seconds(lambda: subprocess.run([KIT, "--help"], check=True, capture_output=True), 11),
        "< 150 ms",
    )
    planning = [KIT, "plan", "--hw=gb200", "--nodes=64"]
    show("dsv4kit plan", seconds(lambda: subprocess.run(planning, check=True, capture_output=True), 11), "< 300 ms")
    show("resolve a profile", seconds(lambda: load_settings("cpu", "tiny", "grpo"), 11), "")
    show("render the batch script", seconds(lambda: script.render("payload"), 11), "< 50 ms")
    large = load_settings("gb200", "dsv4-pro", "grpo", [Override("schedule.nodes", 1024, "bench")]).settings
    largest = SegmentScript(large, load_site("example-gb200-pyxis"), RunDir(Path("/shared/runs/x")), 1)
    show("render that of 1,024 nodes", seconds(lambda: largest.render("payload"), 11), "< 50 ms")
    show(
        "render it, first of a process", seconds(lambda: (environment.cache_clear(), largest.render("payload")), 11), ""
    )
    show("render a Dockerfile, first of a process", seconds(dockerfile, 5), "< 100 ms")
    show("check overrides against verl's tree", seconds(lambda: compose.Tree("ppo_trainer").render(pairs), 5), "")
    show("the same with Hydra", seconds(lambda: by_hydra(pairs), 5), "")
    show("submit a chain of 25 segments (sbatch stubbed)", submit_times(), "< 3 s")


def dockerfile() -> None:
    """Stack read, template compiled, text made."""
    stack.stacks.cache_clear()
    dockerfiles.environment.cache_clear()
    dockerfiles.render("gb200")


def by_hydra(pairs: Mapping[str, Any]) -> None:
    """The check with nothing kept from before."""
    with tempfile.TemporaryDirectory() as empty:
        before = os.environ.get("DSV4KIT_CACHE")
        os.environ["DSV4KIT_CACHE"] = empty
        try:
            compose.Tree("ppo_trainer").render(pairs)
        finally:
            del os.environ["DSV4KIT_CACHE"]
            if before is not None:
                os.environ["DSV4KIT_CACHE"] = before


def submit_times() -> list[float]:
    """Submissions of 25 segments each, with an sbatch that answers at once."""
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.launch.submission import Submission

    resolved = load_settings("cpu", "tiny", "grpo", [Override("schedule.steps", 100, "bench")])
    times = []
    with tempfile.TemporaryDirectory() as name:
        stub = Path(name) / "sbatch"
        stub.write_text("#!/bin/sh\necho Submitted batch job $$\n")
        stub.chmod(0o755)
        slurm = Slurm({"PATH": f"{name}:/usr/bin:/bin"})
        for number in range(5):
            run = RunDir(Path(name) / f"run{number}")
            submission = Submission(resolved, load_site("sandbox"), run, slurm, sys.executable, "/m", "/d")
            since = time.perf_counter()
            submission.submit(lambda line: None)
            times.append(time.perf_counter() - since)
    return times


if __name__ == "__main__":
    main()
