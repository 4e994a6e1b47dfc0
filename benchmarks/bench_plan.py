"""`python -m benchmarks.bench_plan`: the planner on a question the size of DeepSeek-V4-Pro on 64 nodes.

Wall and CPU time: on a busy machine the CPU time is the one to read.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from dsv4kit.config import schema
from dsv4kit.config.loading import HERE, load_settings, load_yaml
from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted.coefficients import built_in
from dsv4kit.plan.counted.inputs import Levers, Parallel, Question, Rollout, Work
from dsv4kit.plan.counted.layout import Rules, generate, weights_for
from dsv4kit.plan.from_settings import question
from dsv4kit.plan.levers import levers
from dsv4kit.plan.search import search
from dsv4kit.plan.shown.table import render


def pro_on_h100() -> Question:
    """64 nodes x 8 H100, PP32 x EP8."""
    tree = load_settings("cpu", "tiny", "grpo").settings.model_dump()
    tree["hardware"] = load_yaml(HERE / "hardware" / "h100.yaml")["hardware"]
    tree["model"] = load_yaml(HERE / "models" / "dsv4-pro.yaml")["model"]
    asked = question(schema.Settings.model_validate(tree))
    assert asked is not None
    return asked._replace(
        parallel=Parallel(64, 8, pipeline=32, expert=8),
        work=Work(64, 2048, 4096, 6144),
        rollout=Rollout(8, 8, 64),
        levers=Levers(cpu_offload=True, precision_aware=True, bf16_gradients=True, param_offload=True),
    )


def measure(name: str, work: Callable[[], object], promise: str, runs: int = 7) -> None:
    """One line: median wall and CPU time of this process and its children."""
    wall, cpu = [], []
    for _ in range(runs):
        since, before = time.perf_counter(), os.times()
        work()
        after = os.times()
        wall.append(time.perf_counter() - since)
        cpu.append(sum(after[:4]) - sum(before[:4]))
    middle = statistics.median
    print(f"{name:44} {middle(wall) * 1000:7.0f} ms wall {middle(cpu) * 1000:7.0f} ms CPU   {promise}", flush=True)


def main() -> None:
    """All of it."""
    c, asked = built_in(), pro_on_h100()

    def answer() -> str:
        plan = evaluate(asked, c)
        return render(plan, levers(plan))

    def layouts() -> None:
        generate.cache_clear()
        for pp in (2, 4, 8, 16, 32):
            generate(Rules(pp, 61, 3, 0), weights_for(asked.geometry, 8))

    def searching() -> None:
        generate.cache_clear()
        search(asked, c)

    start = [
        sys.executable,
        "-c",
        "import benchmarks.bench_plan as b; b.render(b.evaluate(b.pro_on_h100(), b.built_in()))",
    ]
    measure("python -c pass", lambda: subprocess.run([sys.executable, "-c", "pass"], check=True), "for scale")
    schema_only = [sys.executable, "-c", "import dsv4kit.config.loading"]
    measure("python -c import of the schema", lambda: subprocess.run(schema_only, check=True), "for scale")
    measure("plan, from a new process to the text", lambda: subprocess.run(start, check=True), "< 300 ms")
    measure("plan with levers, in process", answer, "")
    measure("five layouts", layouts, "")
    measure("search, 64 nodes x 8 GPUs", searching, "< 2 s")


if __name__ == "__main__":
    main()
