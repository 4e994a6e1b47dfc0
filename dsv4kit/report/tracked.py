"""A run's curve in a tracker's own format, written afterwards from the metrics files: one curve, each step once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dsv4kit.errors import UserError
from dsv4kit.run import metrics
from dsv4kit.run.directory import RunDir
from dsv4kit.run.metrics import StepMetrics

TRACKERS = ("tensorboard", "wandb", "mlflow")


def merged(run: RunDir) -> list[StepMetrics]:
    """The curve over all attempts; a step trained again has its later values."""
    return metrics.merge(metrics.read_metrics(attempt.metrics_file) for attempt in run.attempts())


def write(run: RunDir, to: str, directory: Path) -> int:
    """Writes the curve below `directory` without a network; how many steps. UserError where the library is missing."""
    steps = merged(run)
    if not steps:
        raise UserError(f"{run.name}: no step has metrics yet, there is no curve to write")
    try:
        {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}[to](run, steps, directory)
    except ImportError as error:
        name = error.name or to
        raise UserError(f"{name}: not installed beside the kit; `.venv/bin/pip install {to}` puts it there") from None
    return len(steps)


def _tensorboard(run: RunDir, steps: Sequence[StepMetrics], directory: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    if any(directory.glob("events.out.tfevents.*")):
        raise UserError(f"{directory}: has a curve already, and TensorBoard would show both as one; name another OUT")
    times = _times(run)
    writer = EventFileWriter(str(directory))
    for step in steps:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in step.data.items() if value is not None]
        summary = Summary(value=values)
        writer.add_event(Event(wall_time=times.get(step.step, 0.0), step=step.step, summary=summary))
    writer.close()


def _wandb(run: RunDir, steps: Sequence[StepMetrics], directory: Path) -> None:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(directory)}
    import wandb

    directory.mkdir(parents=True, exist_ok=True)
    tracked = wandb.init(project="dsv4kit", id=run.job_name, name=run.name, dir=str(directory), resume="allow")
    for step in steps:
        tracked.log({name: value for name, value in step.data.items() if value is not None}, step=step.step)
    tracked.finish()


def _mlflow(run: RunDir, steps: Sequence[StepMetrics], directory: Path) -> None:
    import mlflow

    directory.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(f"sqlite:///{directory}/mlflow.db")
    mlflow.set_experiment("dsv4kit")
    with mlflow.start_run(run_name=run.name):
        for step in steps:
            # MLflow's names have no `@`; verl spells it so too.
            values = {name.replace("@", "_at_"): value for name, value in step.data.items() if value is not None}
            mlflow.log_metrics(values, step=step.step)


def _times(run: RunDir) -> dict[int, float]:
    """Step -> seconds since the epoch, as far as the metrics file's age tells: its last step was written then."""
    found: dict[int, float] = {}
    for attempt in run.attempts():
        try:
            at = attempt.metrics_file.stat().st_mtime
        except OSError:
            continue
        for step in reversed(metrics.read_metrics(attempt.metrics_file)):
            found[step.step] = at
            at -= step.data.get(metrics.STEP_TIME) or 0.0
    return found
