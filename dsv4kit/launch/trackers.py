"""What makes the segments of a run one curve in a tracker, and not one each: the same run id at every start."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4kit.run.directory import RunDir


def environment(run: RunDir, loggers: Iterable[str]) -> dict[str, str]:
    """Variables that verl's loggers and the trackers' libraries read; what they write goes below the run directory.

    wandb: WANDB_RUN_ID with WANDB_RESUME=allow goes on with the run (verl passes no id, 0.9.1 utils/tracking.py).
    TensorBoard reads all event files of a directory as one curve. MLflow attaches to a run only by an id that its
    store gave: each segment is a run of its own there, in one experiment.
    """
    found: dict[str, str] = {}
    wanted = set(loggers)
    if "wandb" in wanted:
        found |= {"WANDB_RUN_ID": run.job_name, "WANDB_RESUME": "allow", "WANDB_DIR": str(run.tracking)}
    if "tensorboard" in wanted:
        found["TENSORBOARD_DIR"] = str(run.tracking / "tensorboard")
    if "mlflow" in wanted:
        found["MLFLOW_TRACKING_URI"] = f"sqlite:///{run.tracking}/mlflow.db"
    return found
