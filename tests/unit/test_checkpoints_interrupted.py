"""An interruption at any moment, and whatever may lie on the disk: the two promises of checkpoint_repair hold."""

from __future__ import annotations

import contextlib
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

from dsv4kit.checkpoint.inspection import CheckpointError, inspect, record_sizes
from dsv4kit.checkpoint.repair import CheckpointLost, ResumeDecision, prepare_resume
from dsv4kit.checkpoint.tracker import write_tracker


def prepare(run: Path, **wishes: Any) -> ResumeDecision:
    return prepare_resume(run / "ckpt", run / "quarantine", **wishes)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.exists() else []


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
