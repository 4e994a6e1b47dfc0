"""`python -m benchmarks.bench_profiles`: what a user waits for before a run of the largest profile is in the queue."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.__main__ import seconds, show
from dsv4kit.config.loading import SITES, combinations, load_settings, load_site
from dsv4kit.feasibility import parquet_footer
from dsv4kit.feasibility.case import Case
from dsv4kit.feasibility.refusals import refusals
from dsv4kit.feasibility.run_layout import pipeline_layout
from dsv4kit.verl_keys import compose, overrides

DATA = Path(__file__).parents[1] / "tests" / "data"


def main() -> None:
    """One line each."""
    resolved = load_settings("h100", "dsv4-pro", "grpo")
    settings, site = resolved.settings, load_site("example-h100-pyxis")
    layout = pipeline_layout(settings)
    pairs = overrides.build(
        settings, run_name="x", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/k", layout=layout
    )
    show("resolve one of all profiles", seconds(lambda: load_settings("h100", "dsv4-pro", "grpo"), 11), "")
    show("names of all profiles", seconds(combinations, 11), "")
    show("all rules", seconds(lambda: list(refusals(Case(settings, resolved.sources, site))), 11), "")
    show("the footer of a parquet file", seconds(lambda: parquet_footer.read(DATA / "grpo.parquet"), 11), "")
    show("check Pro's overrides against verl's tree", seconds(lambda: compose.Tree("ppo_trainer").render(pairs), 5), "")
    with tempfile.TemporaryDirectory() as name:
        far = Path(name) / "site.yaml"
        text = (SITES / "sandbox.yaml").read_text()
        far.write_text(text.replace("name: sandbox", "name: far").replace("python: null", "python: /usr/bin/python3"))
        command = [sys.executable, "-m", "dsv4kit.cli.main", "submit", "--hw=h100", f"--site={far}", "--dry-run"]
        env = {**os.environ, "DSV4KIT_RUNS": name}
        times = seconds(lambda: subprocess.run(command, check=True, capture_output=True, env=env), 7)
        show("submit --dry-run of Pro on 64 nodes", times, "< 1 s")


if __name__ == "__main__":
    main()
