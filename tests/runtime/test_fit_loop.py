"""A segment's stop in verl's own fit loop: one save, weights synced and metrics written, no further step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from warm_python import WarmPython

HERE = Path(__file__).resolve().parent


def segment(start: int, target: int, total: int, save_freq: int, stop_at: int = -1, **env: str) -> dict[str, Any]:
    return {"start": start, "target": target, "total": total, "save_freq": save_freq, "stop_at": stop_at, "env": env}


SEGMENTS = {
    # Save frequency 3 would not save step 5.
    "done": segment(start=3, target=5, total=100, save_freq=3),
    "saved anyway": segment(start=10, target=12, total=100, save_freq=12),
    "asked to": segment(start=20, target=90, total=100, save_freq=50, stop_at=21),
    # Its end is long past: after two steps their time is known.
    "out of time": segment(start=30, target=90, total=100, save_freq=50, SLURM_JOB_END_TIME="1"),
    "switched off": segment(start=2, target=3, total=6, save_freq=50, DSV4KIT_SEGMENT_STOP="0"),
}


@pytest.fixture(scope="module")
def found(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    run = tmp_path_factory.mktemp("loop")
    attempt = run / "segment" / "attempt-0"
    attempt.mkdir(parents=True)
    environment = {
        "PYTHONPATH": str(HERE.parents[1]),
        "VERL_USE_EXTERNAL_MODULES": "dsv4kit.plugin.cpu_platform,dsv4kit.plugin.segment_stop",
        "DSV4KIT_ATTEMPT_DIR": str(attempt),
    }
    ran = warm.run(HERE / "fit_loop.py", run, json.dumps(list(SEGMENTS.values())), env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {name: json.loads((run / f"{number}.json").read_text()) for number, name in enumerate(SEGMENTS)}


def unsaved(step: int) -> list[list[object]]:
    return [["train", step], ["sync", step], ["log", step]]


def saved(step: int) -> list[list[object]]:
    return [["train", step], ["save", step], ["sync", step], ["log", step]]


def test_it_ends_at_the_target_with_one_save_while_the_run_is_longer(found: dict[str, dict[str, Any]]) -> None:
    assert found["done"]["events"] == [*unsaved(4), *saved(5)]
    assert found["done"]["stopped"] == {"step": 5, "reason": "segment done"}
    # What the learning rate decays over.
    assert found["done"]["decay_over"] == 100


def test_a_target_that_is_saved_anyway_is_saved_once(found: dict[str, dict[str, Any]]) -> None:
    assert found["saved anyway"]["events"] == [*unsaved(11), *saved(12)]


def test_a_request_ends_it_at_the_next_boundary(found: dict[str, dict[str, Any]]) -> None:
    assert found["asked to"]["events"] == saved(21)
    assert found["asked to"]["stopped"] == {"step": 21, "reason": "stop requested"}


def test_no_step_is_begun_that_would_pass_the_time_limit(found: dict[str, dict[str, Any]]) -> None:
    assert found["out of time"]["events"] == [*unsaved(31), *saved(32)]
    assert found["out of time"]["stopped"]["reason"].startswith("time limit:")


def test_without_the_plugin_the_loop_runs_to_the_end_of_the_run(found: dict[str, dict[str, Any]]) -> None:
    steps = [step for event, step in found["switched off"]["events"] if event == "train"]
    assert steps == [3, 4, 5, 6]
    assert found["switched off"]["stopped"] is None
