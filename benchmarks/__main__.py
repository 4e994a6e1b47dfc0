"""`python -m benchmarks`: every benchmark, a line each; exit status 1 where a promise is broken."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmarks import bench_plan, bench_profiles, bench_runs, bench_start
from benchmarks.measure import run


def main() -> int:
    """All of it. What the kit's processes would compile at each start where bytecode is forbidden is compiled once."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as name:
        modules = (bench_start, bench_profiles, bench_plan, bench_runs)
        return run(benchmark for module in modules for benchmark in module.benchmarks(Path(name)))


if __name__ == "__main__":
    sys.exit(main())
