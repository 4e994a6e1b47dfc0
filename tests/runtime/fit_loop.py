"""Runs verl's own fit loop, its workers stood in for, as segments; prints what happened in each as JSON.

usage: fit_loop.py RUN_DIR SEGMENTS    (a JSON list: start, total, save_freq, stop_at, and `env` as an agent sets it)

verl is imported once; each segment is a fork of its own, because the plugin patches the trainer when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import verl.experimental.agent_loop
import verl.trainer.ppo.core_algos
import verl.workers.engine_workers  # noqa: F401
from hydra import compose, initialize_config_module
from transfer_queue import KVBatchMeta

from dsv4kit.run.course import Course
from dsv4kit.run.directory import AttemptDir


class Workers:
    """What the loop asks of the actor, the rollout replicas and the data loader, written down."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def save_checkpoint(self, local_path: str, remote_path: str | None, step: int, **_: object) -> None:
        Path(local_path).mkdir(parents=True)
        self.events.append(("save", step))

    def update_weights(self, step: int) -> None:
        self.events.append(("sync", step))

    def state_dict(self) -> dict[str, int]:
        return {}

    def log(self, data: dict[str, Any], step: int) -> None:
        self.events.append(("log", step))


class WithoutCluster:
    """Goes before verl's trainer: the loop, the step and the save stay verl's; there is no rollout and no update."""

    def __init__(self, config: Any, start: int, workers: Workers, stop_at: int, stop_file: Path) -> None:
        self.config, self.trainer_mode, self.parameter_sync_step = config, "sync", 1
        self.global_steps, self.total_training_steps, self.steps_per_epoch = (
            start,
            config.trainer.total_training_steps,
            4,
        )
        self.actor_rollout_wg = self.checkpoint_manager = self.train_dataloader = self.workers = workers
        self.use_critic, self.stop_at, self.stop_file = False, stop_at, stop_file
        self.checkpoint_callback = SimpleNamespace(on_save=lambda **_: None)
        self._init_dump_executor()

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        self.workers.events.append(("train", self.global_steps))
        if self.global_steps == self.stop_at:
            self.stop_file.touch()
        return KVBatchMeta(partition_id="train", keys=[], tags=[])

    def prepare_step(self) -> dict[str, Any]:
        return {}

    def _compute_metrics(self, *args: object, **kwargs: object) -> None:
        """Nothing was generated to measure."""


def segment(run: Path, start: int, total: int, save_freq: int, stop_at: int) -> dict[str, Any]:
    """One segment, in this process."""
    from verl.trainer.ppo.v1 import trainer_base, trainer_sync

    changes = [
        f"trainer.default_local_dir={run}/checkpoints",
        f"trainer.total_training_steps={total}",
        f"trainer.save_freq={save_freq}",
        "trainer.total_epochs=1000",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.logger=[]",
        "data.train_batch_size=4",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", changes)
    workers = Workers()
    trainer_class = type("Trainer", (WithoutCluster, trainer_sync.PPOTrainerSync), {})
    trainer = trainer_class(config, start, workers, stop_at, run / "segment" / "STOP")
    stand_ins = {"Tracking": lambda **_: workers, "SkipManager": mock.MagicMock(), "tq": mock.MagicMock()}
    with mock.patch.multiple(trainer_base, **stand_ins):
        trainer.fit(agent_loop_manager=None)
    return {"events": workers.events, "decay_over": config.trainer.total_training_steps}


def main() -> None:
    """Each segment in a fork, one after the other."""
    run = Path(sys.argv[1])
    attempt = run / "segment" / "attempt-0"
    for number, asked in enumerate(json.loads(sys.argv[2])):
        Course(asked["start"], asked.pop("target")).save(AttemptDir(attempt))
        child = os.fork()
        if child == 0:
            os.environ.update(asked.pop("env"))
            found = segment(run, **asked)
            stopped = attempt / "stopped.json"
            found["stopped"] = json.loads(stopped.read_text()) if stopped.exists() else None
            (run / f"{number}.json").write_text(json.dumps(found))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, f"segment {number} failed"
        for left in (attempt / "stopped.json", run / "segment" / "STOP"):
            left.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
