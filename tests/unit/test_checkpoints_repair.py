"""What is done to a checkpoint directory before a segment, and what is refused.

The two promises: a run that has saved is never silently started over, and verl is never pointed to an incomplete step.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_trees as trees
import pytest

from dsv4kit.checkpoint import repair as repair
from dsv4kit.checkpoint.inspection import CheckpointError, inspect, record_sizes
from dsv4kit.checkpoint.repair import CheckpointLost, CheckpointMismatch, ResumeDecision, prepare_resume
from dsv4kit.checkpoint.tracker import read_tracker


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with complete steps 20 and 40; the tracker names 40."""
    for step in (20, 40):
        trees.ppo_fsdp(tmp_path / "ckpt", step)
    trees.tracker(tmp_path / "ckpt", 40)
    return tmp_path


def prepare(run: Path, **wishes: Any) -> ResumeDecision:
    return prepare_resume(run / "ckpt", run / "quarantine", **wishes)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.exists() else []


def test_a_new_run_starts_from_scratch(tmp_path: Path) -> None:
    decision = prepare(tmp_path)
    assert (decision.start_step, decision.actions, decision.from_scratch) == (0, (), True)
    assert trees.what_verl_resumes(tmp_path / "ckpt") is None


def test_a_sound_run_goes_on_where_it_was_and_nothing_is_touched(run: Path) -> None:
    before = trees.snapshot(run)
    decision = prepare(run, high_water_step=40, world_size=2)
    assert (decision.start_step, decision.actions, decision.fell_back_from) == (40, (), None)
    assert trees.snapshot(run) == before


def test_killed_during_a_save_the_half_written_step_is_put_aside(run: Path) -> None:
    trees.fsdp_shards(run / "ckpt/global_step_60/actor", contents=("model",))
    decision = prepare(run, high_water_step=40)
    assert decision.start_step == 40
    assert names(run / "quarantine") == ["global_step_60.1"]
    assert "global_step_60" in decision.actions[0]
    assert "data.pt is missing" in decision.actions[0]


@pytest.mark.parametrize("content", ["", "garbage", b"\0\0"])
def test_killed_while_the_tracker_was_written_the_new_complete_step_counts(run: Path, content: str) -> None:
    """verl empties the tracker before it writes it, after everything else of the step is complete."""
    trees.tracker(run / "ckpt", content)
    decision = prepare(run, high_water_step=20)
    assert (decision.start_step, decision.fell_back_from) == (40, None)
    assert (run / "ckpt" / trees.TRACKER).read_text() == "40"


def test_killed_before_the_first_tracker_was_written(tmp_path: Path) -> None:
    trees.ppo_fsdp(tmp_path / "ckpt", 20)
    assert prepare(tmp_path).start_step == 20
    assert read_tracker(tmp_path / "ckpt") == 20


def test_killed_between_the_data_loader_and_the_tracker_the_newer_step_is_not_trusted(run: Path) -> None:
    trees.ppo_fsdp(run / "ckpt", 60)
    decision = prepare(run, high_water_step=40)
    assert decision.start_step == 40
    assert names(run / "quarantine") == ["global_step_60.1"]
    assert decision.fell_back_from == 60


def test_killed_during_the_very_first_save_the_run_starts_from_scratch(tmp_path: Path) -> None:
    trees.fsdp_shards(tmp_path / "ckpt/global_step_20/actor", contents=("model",))
    decision = prepare(tmp_path)
    assert decision.from_scratch
    assert names(tmp_path / "ckpt") == []
    assert names(tmp_path / "quarantine") == ["global_step_20.1"]


def test_the_same_step_can_be_put_aside_again_and_again(run: Path) -> None:
    for _ in range(3):
        trees.fsdp_shards(run / "ckpt/global_step_60/actor", contents=("model",))
        prepare(run)
    assert names(run / "quarantine") == ["global_step_60.1", "global_step_60.2", "global_step_60.3"]


def test_where_the_tracked_step_is_damaged_the_run_falls_back_and_says_so(run: Path) -> None:
    trees.cut(run / "ckpt/global_step_40/actor/model_world_size_2_rank_1.pt", by=5)
    decision = prepare(run, high_water_step=40)
    assert (decision.start_step, decision.fell_back_from) == (20, 40)
    assert trees.what_verl_resumes(run / "ckpt") == 20
    assert names(run / "quarantine") == ["global_step_40.1"]
    text = "\n".join(decision.actions)
    assert "model_world_size_2_rank_1.pt is cut short" in text
    assert "fell back from step 40 to step 20" in text


def test_where_the_tracked_step_is_gone_the_run_falls_back(run: Path) -> None:
    shutil.rmtree(run / "ckpt/global_step_40")
    decision = prepare(run)
    assert (decision.start_step, decision.fell_back_from) == (20, 40)
    assert "names step 40, which is gone" in decision.actions[0]


def test_a_broken_older_step_is_put_aside_and_a_shell_is_left_to_retention(run: Path) -> None:
    trees.cut(run / "ckpt/global_step_20/data.pt")
    trees.write(run / "ckpt/global_step_10/data.pt", trees.torch_bytes())
    assert prepare(run).start_step == 40
    assert names(run / "ckpt") == ["global_step_10", "global_step_40", trees.TRACKER]
    assert names(run / "quarantine") == ["global_step_20.1"]


def ways_to_lose_everything() -> dict[str, Callable[[Path], None]]:
    def cut_all(ckpt: Path) -> None:
        for path in ckpt.glob("*/data.pt"):
            trees.cut(path)

    def remove_steps(ckpt: Path) -> None:
        for path in ckpt.glob("global_step_*"):
            shutil.rmtree(path)

    def remove_steps_and_empty_tracker(ckpt: Path) -> None:
        remove_steps(ckpt)
        trees.tracker(ckpt, "")

    return {
        "every step damaged": cut_all,
        "every step gone": remove_steps,
        "every step gone, tracker empty": remove_steps_and_empty_tracker,
        "not mounted": shutil.rmtree,
    }


@pytest.mark.parametrize("way", ways_to_lose_everything())
def test_a_run_that_has_saved_is_not_started_over(run: Path, way: str) -> None:
    ways_to_lose_everything()[way](run / "ckpt")
    before = trees.snapshot(run)
    with pytest.raises(CheckpointLost) as refusal:
        prepare(run, high_water_step=40)
    assert refusal.value.evidence
    assert trees.snapshot(run) == before, "a refusal leaves everything for whoever looks into it"


def test_not_even_where_nobody_remembers_but_the_disk_does(run: Path) -> None:
    record_sizes(run / "ckpt/global_step_20")
    (run / "ckpt" / trees.TRACKER).unlink()
    shutil.rmtree(run / "ckpt/global_step_40")
    (run / "ckpt/global_step_20/data.pt").unlink()
    with pytest.raises(CheckpointLost):
        prepare(run, high_water_step=0)


def test_starting_over_can_be_allowed(run: Path) -> None:
    for path in (run / "ckpt").glob("*/data.pt"):
        trees.cut(path)
    decision = prepare(run, high_water_step=40, allow_restart=True)
    assert (decision.start_step, decision.fell_back_from) == (0, 40)
    assert names(run / "ckpt") == []
    assert names(run / "quarantine") == ["global_step_20.1", "global_step_40.1", f"{trees.TRACKER}.1"]
    assert trees.what_verl_resumes(run / "ckpt") is None


def test_allowing_to_start_over_does_not_give_up_what_is_there(run: Path) -> None:
    assert prepare(run, high_water_step=40, allow_restart=True).start_step == 40


def test_shards_of_another_number_of_ranks_are_refused_for_fsdp_only(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match="saved by 2 ranks and this segment has 8"):
        prepare(run, world_size=8)
    trees.ppo_megatron(tmp_path / "m/ckpt", 20)
    trees.tracker(tmp_path / "m/ckpt", 20)
    assert prepare(tmp_path / "m", world_size=8).start_step == 20


def test_a_setting_that_no_checkpoint_meets_does_not_throw_checkpoints_away(tmp_path: Path) -> None:
    """load_contents was extended by the optimizer in the middle of a run that does not save it."""
    trees.ppo_megatron(tmp_path / "ckpt", 20)
    trees.tracker(tmp_path / "ckpt", 20)
    before = trees.snapshot(tmp_path)
    with pytest.raises(CheckpointMismatch, match="does not hold optimizer"):
        prepare(tmp_path, expected_contents=["model", "optimizer", "extra"], high_water_step=20)
    assert trees.snapshot(tmp_path) == before


def test_a_step_that_cannot_be_read_just_now_is_not_passed_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4kit.checkpoint import inspection

    real = inspection.walk_sizes

    def sometimes_stale(path: Path) -> dict[str, int]:
        if path.name == "global_step_40":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path)

    monkeypatch.setattr(inspection, "walk_sizes", sometimes_stale)
    with pytest.raises(CheckpointError, match="cannot be read; not falling back"):
        prepare(run, high_water_step=40)
    assert names(run / "quarantine") == []


def test_an_unwritable_directory_gives_a_clear_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(directory: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(directory / "x"))

    monkeypatch.setattr(repair, "_require_writable", read_only)
    with pytest.raises(
        CheckpointError, match=r"cannot write in the checkpoint directory .*/ckpt: Read-only file system"
    ):
        prepare(run)


def test_a_file_where_the_directory_should_be_gives_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "ckpt").write_text("")
    with pytest.raises(CheckpointError, match="cannot read the checkpoint directory"):
        prepare(tmp_path)


def test_a_directory_in_the_trackers_place_is_moved_away(run: Path) -> None:
    (run / "ckpt" / trees.TRACKER).unlink()
    (run / "ckpt" / trees.TRACKER).mkdir()
    assert prepare(run).start_step == 40
    assert read_tracker(run / "ckpt") == 40


def test_going_on_from_an_older_step(run: Path) -> None:
    decision = prepare(run, from_step=20, high_water_step=40)
    assert (decision.start_step, decision.fell_back_from) == (20, None)
    assert trees.what_verl_resumes(run / "ckpt") == 20
    assert names(run / "quarantine") == ["global_step_40.1"]


def test_going_on_from_a_step_that_is_not_complete_is_refused_with_what_is_usable(run: Path) -> None:
    trees.cut(run / "ckpt/global_step_20/data.pt")
    with pytest.raises(CheckpointError, match=r"complete steps: 40\n.*data.pt is cut short"):
        prepare(run, from_step=20)
    with pytest.raises(CheckpointError, match="there is no global_step_30"):
        prepare(run, from_step=30)


def test_going_back_to_zero_has_to_be_said_twice(run: Path) -> None:
    with pytest.raises(CheckpointLost, match="allowed explicitly"):
        prepare(run, from_step=0)
    assert prepare(run, from_step=0, allow_restart=True).from_scratch
    assert names(run / "ckpt") == []
    assert names(run / "quarantine") == ["global_step_20.1", "global_step_40.1", f"{trees.TRACKER}.1"]


def test_what_cannot_be_renamed_across_file_systems_stays_on_its_own(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def exdev(source: Path, target: Path) -> None:
        if run / "quarantine" in Path(target).parents:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(source, target)

    monkeypatch.setattr(os, "rename", exdev)
    trees.fsdp_shards(run / "ckpt/global_step_60/actor", contents=("model",))
    decision = prepare(run)
    assert names(run / "ckpt/.quarantine") == ["global_step_60.1"]
    assert str(run / "ckpt/.quarantine") in decision.actions[0]
    assert [step.step for step in inspect(run / "ckpt").steps] == [20, 40]


def test_a_step_asked_for_by_number_is_looked_into_too(run: Path) -> None:
    record_sizes(run / "ckpt/global_step_20")
    shard = next((run / "ckpt/global_step_20/actor").glob("model_*"))
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CheckpointError, match="cannot go on from step 20") as error:
        prepare(run, from_step=20)
    assert shard.name in str(error.value)
