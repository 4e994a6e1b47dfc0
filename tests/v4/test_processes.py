"""Two processes on gloo: experts on both, and a pipeline of two stages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).with_name("cases.py")


def run(case: str, size: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank found out."""
    own = folder / case
    own.mkdir()
    logs = [(own / f"{rank}.log").open("w") for rank in range(size)]
    words = [[sys.executable, "-W", "ignore", str(CASES), case, str(rank), str(size), str(own)] for rank in range(size)]
    started = [subprocess.Popen(word, stdout=log, stderr=log) for word, log in zip(words, logs, strict=True)]
    try:
        for rank, process in enumerate(started):
            assert process.wait(600) == 0, (own / f"{rank}.log").read_text()[-3000:]
    finally:
        for process in started:
            process.kill()
    return [json.loads((own / f"{rank}.json").read_text()) for rank in range(size)]


def test_experts_on_two_ranks(tmp_path: Path) -> None:
    one, other = run("expert_parallel", 2, tmp_path)
    assert one["losses"] == pytest.approx(other["losses"], abs=1e-3)
    assert one["losses"][0] == pytest.approx(6.3, abs=0.3)
    assert one["losses"][0] > one["losses"][1] > one["losses"][2]
    assert one["experts"] == other["experts"] == 5 * 4


def test_a_pipeline_of_two_stages(tmp_path: Path) -> None:
    first, last = run("pipeline_parallel", 2, tmp_path)
    assert first["losses"] == []
    assert last["losses"][0] == pytest.approx(6.3, abs=0.3)
    assert last["losses"][0] > last["losses"][1] > last["losses"][2]
    assert (first["layers"], last["layers"]) == (2, 3)
