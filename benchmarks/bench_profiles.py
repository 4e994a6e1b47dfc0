"""What a user waits for before a run is in the queue: profiles, rules, and a dry run of each recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.bench_start import KIT, command
from benchmarks.measure import Benchmark
from dsv4kit.config.loading import SITES, combinations, load_settings, load_site
from dsv4kit.feasibility import parquet_footer
from dsv4kit.feasibility.case import Case
from dsv4kit.feasibility.refusals import refusals
from dsv4kit.feasibility.run_layout import pipeline_layout
from dsv4kit.verl_keys import compose, overrides

DATA = Path(__file__).parents[1] / "tests" / "data"


def benchmarks(scratch: Path) -> Iterator[Benchmark]:
    """The largest profile in this process, then dry runs as a user starts them."""
    resolved = load_settings("h100", "dsv4-pro", "grpo")
    settings, site = resolved.settings, load_site("example-h100-pyxis")
    layout = pipeline_layout(settings)
    pairs = overrides.build(
        settings, run_name="x", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/k", layout=layout
    )
    yield Benchmark("resolve one of all profiles", lambda: load_settings("h100", "dsv4-pro", "grpo"))
    yield Benchmark("names of all profiles", combinations)
    yield Benchmark("all rules", lambda: list(refusals(Case(settings, resolved.sources, site))))
    yield Benchmark("the footer of a parquet file", lambda: parquet_footer.read(DATA / "grpo.parquet"))
    yield Benchmark("check Pro's overrides against verl's tree", lambda: compose.Tree("ppo_trainer").render(pairs))
    far = scratch / "site.yaml"
    text = (SITES / "sandbox.yaml").read_text()
    far.write_text(text.replace("name: sandbox", "name: far").replace("python: null", "python: /usr/bin/python3"))
    for model, recipe in [("dsv4-pro", "grpo"), ("dsv4-flash", "sft")]:
        words = ("submit", "--hw=h100", f"--model={model}", f"--recipe={recipe}", f"--site={far}", "--dry-run")
        dry_run = command(KIT, *words, DSV4KIT_RUNS=str(scratch))
        yield Benchmark(f"submit --dry-run of {model} {recipe}", dry_run, 1.5, runs=5)
