"""The planner on a question the size of DeepSeek-V4-Pro on 64 nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Benchmark
from dsv4kit.config import schema
from dsv4kit.config.loading import HERE, load_settings, load_yaml
from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted.coefficients import built_in
from dsv4kit.plan.counted.inputs import ActorSplit, Levers, Question, RolloutSplit, Work
from dsv4kit.plan.counted.layout import LayoutRules, generate, weights_for
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
        parallel=ActorSplit(64, 8, pipeline=32, expert=8),
        work=Work(64, 2048, 4096, 6144),
        rollout=RolloutSplit(8, 8, 64),
        levers=Levers(cpu_offload=True, precision_aware=True, bf16_gradients=True, param_offload=True),
    )


def benchmarks(scratch: Path) -> Iterator[Benchmark]:
    """In this process: what `dsv4kit plan` takes besides its start."""
    c, asked = built_in(), pro_on_h100()

    def answer() -> str:
        plan = evaluate(asked, c)
        return render(plan, levers(plan))

    def layouts() -> None:
        generate.cache_clear()
        for pp in (2, 4, 8, 16, 32):
            generate(LayoutRules(pp, 61, 3, 0), weights_for(asked.geometry, 8))

    def searching() -> None:
        generate.cache_clear()
        search(asked, c)

    yield Benchmark("plan with levers", answer)
    yield Benchmark("five layouts", layouts)
    yield Benchmark("search, 64 nodes x 8 GPUs", searching, 2.0, runs=3)
