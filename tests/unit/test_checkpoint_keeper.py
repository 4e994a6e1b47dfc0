"""Which checkpoints of a run stay while it trains: the node's keeper over directories as verl writes them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import checkpoint_trees as trees
import pytest
from test_node import node_spec

from dsv4kit.checkpoint import retention
from dsv4kit.node.checkpoint_keeper import CheckpointKeeper
from dsv4kit.run.course import SegmentRequest
from dsv4kit.run.directory import AttemptDir, RunDir
from dsv4kit.run.node_spec import NodeSpec


class Training:
    """A run in its second segment, and what its driver saves."""

    def __init__(self, path: Path, start: int = 20, **kept: int | None) -> None:
        self.run = RunDir(path)
        self.attempt: AttemptDir = self.run.segment(2).attempt(0)
        self.attempt.path.mkdir(parents=True)
        self.run.segment(1).path.mkdir()
        self.directory = path / "checkpoints"
        for step in range(10, start + 1, 10):
            self.save(step)
        self.keeper = CheckpointKeeper(node_spec(path, **kept), self.attempt, start)

    def save(self, step: int) -> None:
        trees.ppo_fsdp(self.directory, step)
        trees.tracker(self.directory, step)

    def steps(self) -> list[int]:
        names = (name.rpartition("_")[2] for name in os.listdir(self.directory) if name.startswith("global_step_"))
        return sorted(int(name) for name in names if name.isdecimal())

    def saves(self, *steps: int) -> None:
        """Saves one after the other, each seen by the keeper, and ends."""
        self.keeper.begin()
        for step in steps:
            self.save(step)
            wait_for(lambda step=step: (self.directory / f"global_step_{step}/dsv4kit.sizes.json").exists())  # type: ignore[misc]
        self.keeper.settle(30)
        self.keeper.close(30, threading.Event())


def wait_for(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_newest_the_milestones_and_the_one_it_began_with_stay(tmp_path: Path) -> None:
    training = Training(tmp_path, start=20, keep_last=2, keep_every=40)
    training.saves(30, 40, 50, 60, 70)
    assert training.steps() == [20, 40, 60, 70]
    assert "deleted global_step_50" in training.keeper.new_lines()


def test_the_best_by_reward_stay(tmp_path: Path) -> None:
    training = Training(tmp_path, start=10, keep_last=1, keep_best=2)
    rewards = {20: 0.9, 30: 0.1, 40: 0.8, 50: 0.2}
    lines = [
        json.dumps({"step": s, "data": {"training/global_step": s, "critic/score/mean": r}}) for s, r in rewards.items()
    ]
    training.attempt.metrics_file.write_text("\n".join(lines) + "\n")
    training.saves(20, 30, 40, 50, 60)
    assert training.steps() == [10, 20, 40, 60]


def test_without_a_word_about_it_all_stay(tmp_path: Path) -> None:
    """So it is in every run that an older kit has begun."""
    training = Training(tmp_path, start=20)
    training.saves(30, 40)
    assert training.steps() == [10, 20, 30, 40]
    content = training.keeper._spec.as_dict()
    old = {key: value for key, value in content.items() if not key.startswith("keep_")}
    training.run.node_spec_file.write_text(json.dumps(old))
    assert NodeSpec.load(training.run).keep_last is None


def test_nothing_is_deleted_before_the_next_checkpoint_is_complete_on_disk(tmp_path: Path) -> None:
    training = Training(tmp_path, start=20, keep_last=1)
    shard = trees.ppo_fsdp(training.directory, 30) / "actor/model_world_size_2_rank_1.pt"
    whole = shard.read_bytes()
    shard.write_bytes(bytes(len(whole)))
    trees.tracker(training.directory, 30)
    training.keeper.begin()
    time.sleep(1)
    assert training.steps() == [10, 20, 30]
    shard.write_bytes(whole)
    wait_for(lambda: training.steps() == [20, 30])
    training.keeper.settle(30)
    training.keeper.close(30, threading.Event())


def test_a_step_that_somebody_wants_back_stays(tmp_path: Path) -> None:
    training = Training(tmp_path, start=40, keep_last=1)
    SegmentRequest(10).save(training.run.segment(3))
    SegmentRequest(20).save(training.run.segment(1))  # done with
    (training.directory / "global_step_30" / "keep.another-run").touch()
    training.saves(50)
    assert training.steps() == [10, 30, 40, 50]


def test_a_step_that_is_kept_at_the_very_moment_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path, start=20, keep_last=1)
    real = os.rename

    def rename(one: Path, other: Path) -> None:
        if str(other).endswith(retention.DELETING_SUFFIX):
            (Path(one) / "keep").touch()
        real(one, other)

    monkeypatch.setattr(os, "rename", rename)
    training.saves(30)
    assert training.steps() == [10, 20, 30]


def test_what_the_attempt_before_had_no_time_to_delete_is_deleted(tmp_path: Path) -> None:
    training = Training(tmp_path, start=30, keep_last=1)
    trees.ppo_fsdp(training.directory, 5).rename(training.directory / "global_step_5.deleting")
    training.keeper.begin()
    wait_for(lambda: sorted(os.listdir(training.directory)) == ["global_step_30", trees.TRACKER])
    training.keeper.settle(30)
    training.keeper.close(30, threading.Event())


def test_after_its_attempt_it_deletes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next job of the run may have begun."""
    training = Training(tmp_path, start=40, keep_last=1)
    first, go_on = threading.Event(), threading.Event()
    real = retention.read_tracker

    def slow(directory: Path) -> int | None:
        first.set()
        go_on.wait(30)
        return real(directory)

    monkeypatch.setattr(retention, "read_tracker", slow)
    training.keeper.begin()
    assert first.wait(30)
    hurry = threading.Event()
    hurry.set()
    training.keeper.settle(0)
    training.keeper.close(60, hurry)
    go_on.set()
    wait_for(lambda: not training.keeper._thread.is_alive())
    assert training.steps() == [20, 30, 40]
