"""What is done to a checkpoint directory before a segment, and what is refused.

The two promises: a run that has saved is never silently started over, and verl is never pointed to an incomplete step.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_trees as trees
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kit.trainer import checkpoint_repair as repair
from dsv4kit.trainer.checkpoint_repair import CheckpointLost, CheckpointMismatch, ResumeDecision, prepare_resume
from dsv4kit.trainer.checkpoints import CheckpointError, inspect, record_sizes
from dsv4kit.trainer.tracker import read_tracker, write_tracker


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


# ------------------------------------------------------------------------------------------- the usual


def test_a_new_run_starts_from_scratch(tmp_path: Path) -> None:
    decision = prepare(tmp_path)
    assert (decision.start_step, decision.actions, decision.from_scratch) == (0, (), True)
    assert trees.what_verl_resumes(tmp_path / "ckpt") is None


def test_a_sound_run_goes_on_where_it_was_and_nothing_is_touched(run: Path) -> None:
    before = trees.snapshot(run)
    decision = prepare(run, high_water_step=40, world_size=2)
    assert (decision.start_step, decision.actions, decision.fell_back_from) == (40, (), None)
    assert trees.snapshot(run) == before


# ------------------------------------------------------------------------------------------- after a kill


def test_killed_during_a_save_the_half_written_step_is_put_aside(run: Path) -> None:
    trees.fsdp_shards(run / "ckpt/global_step_60/actor", contents=("model",))
    decision = prepare(run, high_water_step=40)
    assert decision.start_step == 40
    assert names(run / "quarantine") == ["global_step_60.1"]
    assert "global_step_60" in decision.actions[0]
    assert "data.pt is missing" in decision.actions[0] or "is missing" in decision.actions[0]


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


# ------------------------------------------------------------------------------------------- after damage


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


# ------------------------------------------------------------------------------------------- what is refused


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
    from dsv4kit.trainer import checkpoints

    real = checkpoints.walk_sizes

    def sometimes_stale(path: Path) -> dict[str, int]:
        if path.name == "global_step_40":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path)

    monkeypatch.setattr(checkpoints, "walk_sizes", sometimes_stale)
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


# ------------------------------------------------------------------------------------------- from a given step


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


# ------------------------------------------------------------------------------------------- other file systems


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


# ------------------------------------------------------------------------------------------- interruptions

CALLS = ("rename", "replace", "fsync", "makedirs", "unlink")


class Killed(BaseException):
    """The process ends here. No `except Exception` sees it, as none would see SIGKILL."""


def killed_at(monkeypatch: pytest.MonkeyPatch, call_number: int, *, after: bool) -> Iterator[int]:
    """Every `os` call that changes the disk is counted; at `call_number` the process dies, before or after it."""
    count = 0
    for name in CALLS:
        real = getattr(os, name)

        def counted(*args: Any, _real: Any = real, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call_number and not after:
                raise Killed
            result = _real(*args, **kwargs)
            if count == call_number:
                raise Killed
            return result

        monkeypatch.setattr(os, name, counted)
    yield 0


SCENES: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "half-written newer step": (
        lambda ckpt: trees.fsdp_shards(ckpt / "global_step_60/actor", contents=("model",)),
        {"high_water_step": 40},
    ),
    "tracked step damaged": (lambda ckpt: trees.cut(ckpt / "global_step_40/data.pt"), {"high_water_step": 40}),
    "tracker empty": (lambda ckpt: trees.tracker(ckpt, "").touch(), {"high_water_step": 40}),
    "from an older step": (lambda ckpt: None, {"high_water_step": 40, "from_step": 20}),
    "starting over": (
        lambda ckpt: [trees.cut(path) for path in ckpt.glob("*/data.pt")].clear(),
        {"high_water_step": 40, "allow_restart": True},
    ),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("scene", SCENES)
def test_an_interruption_anywhere_is_made_good_by_the_next_call(tmp_path: Path, scene: str, after: bool) -> None:
    damage, wishes = SCENES[scene]
    for call_number in range(1, 60):
        run = tmp_path / str(call_number)
        for step in (20, 40):
            trees.ppo_fsdp(run / "ckpt", step)
        trees.tracker(run / "ckpt", 40)
        damage(run / "ckpt")
        files = sorted(trees.snapshot(run).values())

        with pytest.MonkeyPatch.context() as patch:
            killing = killed_at(patch, call_number, after=after)
            next(killing)
            try:
                expected = prepare(run, **wishes).start_step
                interrupted = False
            except Killed:
                interrupted = True
        if not interrupted:
            break
        # Whatever the kill left, the next call never picks an incomplete step or starts over by itself without the
        # user's wish, and comes to the same step with it.
        plain = run.with_name(f"{call_number}-plain")
        shutil.copytree(run, plain)
        try:
            state = inspect(plain / "ckpt")
            decision = prepare(plain, high_water_step=40)
            assert decision.start_step > 0
            assert decision.start_step in [step.step for step in state.complete]
        except CheckpointLost:
            assert not state.complete
        again = prepare(run, **wishes)
        assert again.start_step == {"from an older step": 20, "tracked step damaged": 20, "starting over": 0}.get(
            scene, 40
        )
        assert (trees.what_verl_resumes(run / "ckpt") or 0) == again.start_step
        left = trees.snapshot(run)
        kept = [content for name, content in left.items() if not name.endswith((".tmp", ".probe"))]
        lost = [content for content in files if content not in kept and content not in (b"40", b"")]
        assert not lost, "nothing is ever deleted"
    else:
        raise AssertionError("never ran to its end")
    assert call_number > 2
    assert expected == again.start_step


# ------------------------------------------------------------------------------------------- the two promises

DAMAGE: dict[str, Callable[[Path], None]] = {
    "none": lambda root: None,
    "recorded": lambda root: record_sizes(root) and None,
    "no data.pt": lambda root: (root / "data.pt").unlink(),
    "cut data.pt": lambda root: trees.cut(root / "data.pt", 3),
    "no rank 1": lambda root: (root / "actor/model_world_size_2_rank_1.pt").unlink(),
    "empty shard": lambda root: (root / "actor/optim_world_size_2_rank_0.pt").write_bytes(b"") and None,
    "shell": lambda root: shutil.rmtree(root / "actor"),
    "empty": lambda root: [shutil.rmtree(root), root.mkdir()].clear(),
    "a file": lambda root: [shutil.rmtree(root), root.touch()].clear(),
}


@settings(max_examples=150, deadline=None)
@given(
    steps=st.dictionaries(st.integers(0, 6), st.sampled_from(sorted(DAMAGE)), max_size=4),
    tracker=st.one_of(st.none(), st.sampled_from(["", "x", "0", "-1", "1\n"]), st.integers(0, 7).map(str)),
    high_water=st.integers(0, 7),
    from_step=st.one_of(st.none(), st.none(), st.integers(0, 7)),
    allow_restart=st.booleans(),
)
def test_whatever_is_on_disk_no_silent_restart_and_no_incomplete_step(
    steps: dict[int, str], tracker: str | None, high_water: int, from_step: int | None, allow_restart: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        (run / "ckpt").mkdir()
        for step, damage in steps.items():
            root = trees.ppo_fsdp(run / "ckpt", step)
            if damage != "recorded" or step:
                DAMAGE[damage](root)
        if tracker is not None:
            trees.tracker(run / "ckpt", tracker)
        before = trees.snapshot(run)
        whole = {step for step, damage in steps.items() if damage in ("none", "recorded") and step > 0}
        assert {state.step for state in inspect(run / "ckpt").complete} == whole

        try:
            decision = prepare(run, high_water_step=high_water, from_step=from_step, allow_restart=allow_restart)
        except CheckpointError:
            assert trees.snapshot(run) == before, "a refusal touches nothing"
            assert from_step is not None or not whole, "a complete step is never refused"
            return

        start = decision.start_step
        assert (trees.what_verl_resumes(run / "ckpt") or 0) == start, "verl does what was decided"
        if start == 0:
            assert allow_restart or (not whole and high_water == 0 and tracker is None)
            assert from_step == 0 or not whole
        else:
            assert start in whole
            assert from_step in (None, start)
            named = int(tracker) if tracker and tracker.strip().isdecimal() else None
            if from_step is None:
                assert start == (named if named in whole else max(whole))
        left = inspect(run / "ckpt").steps
        assert all(state.step <= start for state in left), "nothing newer is left for verl to save into"
        assert all(state.complete or state.shell for state in left)
        if from_step is None and start < max([high_water, *whole]):
            assert decision.fell_back_from
            assert decision.actions
        after = trees.snapshot(run)
        assert sorted(c for n, c in before.items() if trees.TRACKER not in n) == sorted(
            c for n, c in after.items() if trees.TRACKER not in n
        ), "nothing is deleted"
        assert prepare(run, high_water_step=high_water, allow_restart=allow_restart).start_step == start, "settled"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_tracker_is_never_seen_half_written(tmp_path: Path, after: bool) -> None:
    seen = set()
    for call_number in range(1, 6):
        trees.tracker(tmp_path, 40)
        with pytest.MonkeyPatch.context() as patch:
            next(killed_at(patch, call_number, after=after))
            with contextlib.suppress(Killed):
                write_tracker(tmp_path, 1234567)
        seen.add((tmp_path / trees.TRACKER).read_text())
    assert seen == {"40", "1234567"}
