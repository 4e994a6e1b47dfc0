"""Which old checkpoints are deleted, and how."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import checkpoint_trees as trees
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4kit.checkpoint.inspection import CheckpointState, StepState, inspect
from dsv4kit.checkpoint.retention import apply_retention, retention_plan
from dsv4kit.checkpoint.tracker import Tracker


def state(
    complete: list[int], tracker: int | None, broken: list[int] | None = None, shells: list[int] | None = None
) -> CheckpointState:
    """A directory of which only the steps matter."""

    def path(step: int) -> Path:
        return Path("/ckpt") / f"global_step_{step}"

    steps = [StepState(step, path(step)) for step in complete]
    steps += [StepState(step, path(step), problems=("data.pt is missing",)) for step in broken or []]
    steps += [
        StepState(step, path(step), problems=("actor/ holds no checkpoint",), shell=True) for step in shells or []
    ]
    return CheckpointState(Path("/ckpt"), Tracker(tracker), tuple(sorted(steps, key=lambda s: s.step)))


def planned(*args: object, **kwargs: object) -> list[int]:
    return [int(path.name.rpartition("_")[2]) for path in retention_plan(*args, **kwargs)]  # type: ignore[arg-type]


def test_the_last_k_and_the_milestones_stay() -> None:
    steps = list(range(20, 220, 20))
    assert planned(state(steps, tracker=200), keep_last=2) == [20, 40, 60, 80, 100, 120, 140, 160]
    assert planned(state(steps, tracker=200), keep_last=2, milestone_every=100) == [20, 40, 60, 80, 120, 140, 160]
    assert planned(state(steps, tracker=200), keep_last=1, keep=[60]) == [20, 40, 80, 100, 120, 140, 160, 180]
    assert planned(state(steps, tracker=200), keep_last=99) == []


def test_what_is_newer_than_the_tracker_is_being_written() -> None:
    assert planned(state([20, 40, 60], tracker=40), keep_last=1) == [20]


def test_nothing_goes_while_the_trackers_own_step_is_in_doubt() -> None:
    assert planned(state([20, 40], tracker=None), keep_last=1) == []
    assert planned(state([20, 40], tracker=60), keep_last=1) == []
    assert planned(state([20, 40], tracker=60, broken=[60]), keep_last=1) == []


def test_shells_go_and_broken_steps_are_left_to_the_quarantine() -> None:
    assert planned(state([40], tracker=40, broken=[20], shells=[10, 60]), keep_last=1) == [10]


def test_keeping_none_is_not_possible() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        planned(state([20], tracker=20), keep_last=0)
    with pytest.raises(ValueError, match="at least 1"):
        planned(state([20], tracker=20), keep_last=1, milestone_every=0)


@given(st.sets(st.integers(1, 60)), st.integers(1, 60), st.integers(1, 5), st.none() | st.integers(1, 20))
def test_the_tracker_step_and_k_checkpoints_always_survive(
    complete: set[int], tracker: int, keep_last: int, milestone: int | None
) -> None:
    doomed = set(planned(state(sorted(complete), tracker), keep_last, milestone))
    left = {step for step in complete - doomed if step <= tracker}
    assert tracker not in doomed
    assert max(doomed, default=0) < tracker
    assert len(left) >= min(keep_last, len({step for step in complete if step <= tracker}))
    assert not milestone or not any(step % milestone == 0 for step in doomed)


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    for step in (20, 40, 60):
        trees.ppo_fsdp(tmp_path, step)
    trees.tracker(tmp_path, 60)
    return tmp_path


def test_a_plan_is_carried_out(ckpt: Path) -> None:
    done = apply_retention(ckpt, retention_plan(inspect(ckpt), keep_last=1))
    assert done == ["deleted global_step_20", "deleted global_step_40"]
    assert sorted(os.listdir(ckpt)) == ["global_step_60", trees.TRACKER]


def test_a_half_deleted_step_is_never_taken_for_a_checkpoint(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.rmtree

    def dies(path: Path) -> None:
        (Path(path) / "data.pt").unlink()
        raise KeyboardInterrupt

    plan = retention_plan(inspect(ckpt), keep_last=1)
    monkeypatch.setattr(shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        apply_retention(ckpt, plan)
    assert [step.step for step in inspect(ckpt).steps] == [60]
    monkeypatch.setattr(shutil, "rmtree", real)
    apply_retention(ckpt, [])
    assert sorted(os.listdir(ckpt)) == ["global_step_60", trees.TRACKER]


def test_the_step_that_the_tracker_names_by_now_is_spared(ckpt: Path) -> None:
    plan = retention_plan(inspect(ckpt), keep_last=1)
    trees.tracker(ckpt, 40)
    done = apply_retention(ckpt, plan)
    assert "kept global_step_40: the tracker names 40 by now" in done
    assert (ckpt / "global_step_40").exists()
    trees.tracker(ckpt, "")
    apply_retention(ckpt, plan)
    assert (ckpt / "global_step_40").exists()


def test_a_linked_step_loses_its_link_only(ckpt: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (ckpt / "global_step_20").rename(elsewhere / "x")
    (ckpt / "global_step_20").symlink_to(elsewhere / "x")
    apply_retention(ckpt, retention_plan(inspect(ckpt), keep_last=1))
    assert not (ckpt / "global_step_20").exists()
    assert (elsewhere / "x/data.pt").exists()


def test_a_failure_is_reported_and_ends_nothing(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shutil, "rmtree", refuses)
    done = apply_retention(ckpt, retention_plan(inspect(ckpt), keep_last=2))
    assert done == ["could not delete all of global_step_20.deleting: Operation not permitted"]


def test_only_the_kits_own_leftovers_are_deleted(ckpt: Path) -> None:
    for name in ("notes.deleting", "global_step_x.deleting", "global_step_.deleting"):
        (ckpt / name).mkdir()
    apply_retention(ckpt, [])
    assert {"notes.deleting", "global_step_x.deleting", "global_step_.deleting"} <= set(os.listdir(ckpt))


def test_a_path_from_elsewhere_is_not_deleted(ckpt: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = trees.ppo_fsdp(tmp_path_factory.mktemp("other"), 20)
    with pytest.raises(ValueError, match="is not in"):
        apply_retention(ckpt, [other])
    assert other.exists()
