"""What a user waits for at a prompt: help, a plan, and what a submission renders and checks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import Benchmark
from dsv4kit.config.loading import Override, load_settings, load_site
from dsv4kit.image import render as dockerfiles
from dsv4kit.image import stack
from dsv4kit.launch.render import SegmentScript
from dsv4kit.run.directory import RunDir
from dsv4kit.templates import environment
from dsv4kit.verl_keys import compose, overrides

KIT = str(Path(sys.executable).with_name("dsv4kit"))


def command(*words: str, **env: str) -> Callable[[], object]:
    """A process that has to succeed."""
    return functools.partial(subprocess.run, words, check=True, capture_output=True, env={**os.environ, **env})


def benchmarks(scratch: Path) -> Iterator[Benchmark]:
    """In the order in which a user meets them."""
    settings = load_settings("cpu", "tiny", "grpo").settings
    script = SegmentScript(settings, load_site("sandbox"), RunDir(Path("/shared/runs/x")), 1)
    large = load_settings("gb200", "dsv4-pro", "grpo", [Override("schedule.nodes", 1024, "bench")]).settings
    largest = SegmentScript(large, load_site("example-gb200-pyxis"), RunDir(Path("/shared/runs/x")), 1)
    pairs = overrides.build(settings, run_name="x", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/r/kit")
    yield Benchmark("python -c pass", command(sys.executable, "-c", "pass"), runs=11)
    yield Benchmark("dsv4kit --help", command(KIT, "--help"), 0.150, runs=11)
    # Of it some 250 ms are pydantic's import and models: the price of typed settings that editors can check.
    yield Benchmark("dsv4kit plan", command(KIT, "plan", "--hw=gb200", "--nodes=64"), 0.650, runs=11)
    yield Benchmark("import of pydantic", command(sys.executable, "-c", "from pydantic import BaseModel"))
    yield Benchmark("import of the settings", command(sys.executable, "-c", "import dsv4kit.config.loading"))
    yield Benchmark("render the batch script", lambda: script.render("payload"), 0.050)
    yield Benchmark("render that of 1,024 nodes", lambda: largest.render("payload"), 0.050)
    yield Benchmark(
        "render it, first of a process", lambda: (environment.cache_clear(), largest.render("payload")), 0.050
    )
    yield Benchmark("render a Dockerfile, first of a process", _dockerfile, 0.100)
    yield Benchmark("check overrides against verl's tree", lambda: compose.Tree("ppo_trainer").render(pairs))
    yield Benchmark("the same with Hydra", lambda: _by_hydra(pairs), runs=3)


def _dockerfile() -> None:
    stack.stacks.cache_clear()
    environment.cache_clear()
    dockerfiles.render("gb200")


def _by_hydra(pairs: Mapping[str, Any]) -> None:
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
