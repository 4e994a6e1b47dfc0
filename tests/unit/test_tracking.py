"""Segments of a run are one curve in a tracker, and a tracker that could not log is refused before the run."""

from pathlib import Path
from typing import Any

import pytest
import report_runs

from dsv4kit.cli.main import run as dsv4kit
from dsv4kit.config.loading import load_settings, load_site
from dsv4kit.errors import UserError
from dsv4kit.feasibility import logger_rules
from dsv4kit.feasibility.case import Case, ImageFacts
from dsv4kit.launch.trackers import environment
from dsv4kit.report import tracked
from dsv4kit.run.directory import RunDir


def case(loggers: list[str], packages: dict[str, str] | None = None, env: dict[str, str] | None = None) -> Case:
    resolved = load_settings("cpu", "tiny", "grpo")
    settings = resolved.settings.model_copy(update={"loggers": loggers, "env": env or {}})
    image = ImageFacts("/image.sqsh", "x86_64", {"packages": packages}, 1) if packages is not None else None
    return Case(settings, resolved.sources, load_site("sandbox"), image)


def test_all_starts_of_a_run_have_the_same_id(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    assert environment(run, ["console", "file"]) == {}
    found = environment(run, ["wandb", "tensorboard"])
    assert found["WANDB_RUN_ID"] == run.job_name
    assert found["WANDB_RESUME"] == "allow"
    assert all(value.startswith(str(run.path)) for key, value in found.items() if key.endswith("DIR"))
    assert environment(RunDir(tmp_path / "b"), ["wandb"])["WANDB_RUN_ID"] != found["WANDB_RUN_ID"]


def test_a_logger_that_the_image_lacks_is_refused() -> None:
    assert [one.value for one in logger_rules.in_the_image(case(["console", "wandb"], {"torch": "2"}))] == ["wandb"]
    assert list(logger_rules.in_the_image(case(["wandb", "file"], {"wandb": "0.31"}))) == []
    assert list(logger_rules.in_the_image(case(["wandb"]))) == []


def test_a_logger_that_needs_a_key_is_refused_without_one() -> None:
    refused = list(logger_rules.with_a_key(case(["wandb", "tensorboard"])))
    assert [one.value for one in refused] == ["wandb"]
    assert "secrets_file" in refused[0].line
    assert "SET=env.WANDB_MODE=offline" in refused[0].line
    assert list(logger_rules.with_a_key(case(["wandb"], env={"WANDB_MODE": "offline"}))) == []


def test_a_tracker_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path))
    report_runs.make(tmp_path, "a", segments=1, fault_at=None)
    with pytest.raises(UserError, match="did you mean 'wandb'"):
        dsv4kit(["track", "a", "--to", "wandbb"])
    with pytest.raises(UserError, match="not set; allowed: tensorboard, wandb, mlflow"):
        dsv4kit(["track", "a"])


def test_a_step_trained_again_is_written_once_with_its_later_values(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path, "a", segments=3, fault_at=2)
    steps = [step.step for step in tracked.merged(run)]
    assert steps == list(range(1, 31))
    later = {step.step: step.data["perf/other0"] for step in tracked.merged(run)}
    again = {step.step: step.data["perf/other0"] for step in tracked.metrics.read_metrics(third(run))}
    assert {step: later[step] for step in again} == again


def third(run: RunDir) -> Path:
    return run.segment(3).attempt(0).metrics_file


def test_tensorboards_own_reader_sees_one_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path))
    report_runs.make(tmp_path, "a", segments=3, fault_at=2)
    assert dsv4kit(["track", "a", "--to", "tensorboard", "--out", str(tmp_path / "tb")]) == 0
    events = reader.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    curve = [(one.step, one.value) for one in events.Scalars("response_length/clip_ratio")]
    assert [step for step, _ in curve] == list(range(1, 31))
    assert curve[0][1] == pytest.approx(0.798)
    assert 3 not in [one.step for one in events.Scalars("critic/score/mean")]
    with pytest.raises(UserError, match="has a curve already"):
        dsv4kit(["track", "a", "--to", "tensorboard", "--out", str(tmp_path / "tb")])
