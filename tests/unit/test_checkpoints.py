"""Which of verl's checkpoints are complete, and what is said about the others."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import checkpoint_trees as trees
import pytest

from dsv4kit.checkpoint import inspection, shard_files, tracker
from dsv4kit.checkpoint.inspection import CheckpointError, CheckpointLayout, inspect, inspect_step, record_sizes
from dsv4kit.checkpoint.tracker import read_tracker

LAYOUTS: dict[CheckpointLayout, Callable[[Path, int], Path]] = {
    CheckpointLayout.PPO_FSDP: trees.ppo_fsdp,
    CheckpointLayout.PPO_MEGATRON: trees.ppo_megatron,
    CheckpointLayout.SFT_FSDP: trees.sft_fsdp,
    CheckpointLayout.SFT_MEGATRON: trees.sft_megatron,
}


@pytest.mark.parametrize(("content", "step"), [("20", 20), ("20\n", 20), (b" 7 ", 7), ("0020", 20)])
def test_a_tracker_names_a_step(tmp_path: Path, content: str, step: int) -> None:
    trees.tracker(tmp_path, content)
    assert read_tracker(tmp_path) == step


@pytest.mark.parametrize(
    "content", ["", "\n", "abc", "-3", "0", "1_0", "2.0", "20 21", "٣", b"\xff\xfe", b"\0\0", "9" * 5000, "0x14"]
)
def test_garbage_in_the_tracker_names_no_step(tmp_path: Path, content: str | bytes) -> None:
    trees.tracker(tmp_path, content)
    assert read_tracker(tmp_path) is None
    assert tracker.read_tracker_state(tmp_path).exists


def test_a_missing_tracker_or_directory_names_no_step(tmp_path: Path) -> None:
    assert read_tracker(tmp_path) is None
    assert read_tracker(tmp_path / "nowhere") is None
    (tmp_path / trees.TRACKER).mkdir()
    assert read_tracker(tmp_path) is None


def test_the_tracker_is_written_in_verls_own_format(tmp_path: Path) -> None:
    tracker.write_tracker(tmp_path, 40)
    assert (tmp_path / trees.TRACKER).read_bytes() == b"40"
    assert os.listdir(tmp_path) == [trees.TRACKER]
    with pytest.raises(ValueError, match="at least 1"):
        tracker.write_tracker(tmp_path, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_recognised_and_complete(tmp_path: Path, layout: CheckpointLayout) -> None:
    LAYOUTS[layout](tmp_path, 20)
    (state,) = inspect(tmp_path).steps
    assert (state.step, state.layout, state.findings) == (20, layout, ())
    assert state.complete
    assert state.total_bytes > 0
    assert "model" in state.contents
    assert "extra" in state.contents


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_single_file_that_verl_needs_is_missed_when_gone_or_empty(
    tmp_path: Path, layout: CheckpointLayout
) -> None:
    """The FSDP export of the model's configuration, which resuming does not read, is all that may be lost unseen."""
    root = LAYOUTS[layout](tmp_path, 20)
    data_ranks = len(list(root.glob("data_*.pt"))) or None
    for name, content in trees.snapshot(root).items():
        unread = name.endswith("huggingface/config.json") and "model/" not in name
        (root / name).unlink()
        gone = inspect_step(root, data_ranks=data_ranks)
        assert gone.complete == (unread or name.endswith("index.json")), f"{name} gone: {gone.findings}"
        (root / name).write_bytes(b"")
        assert inspect_step(root, data_ranks=data_ranks).complete == unread, f"{name} empty"
        (root / name).write_bytes(content)
    assert inspect_step(root).complete


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cut_short_file_is_found_and_named(tmp_path: Path, layout: CheckpointLayout) -> None:
    root = LAYOUTS[layout](tmp_path, 20)
    for name, content in trees.snapshot(root).items():
        if name.endswith("huggingface/config.json") and "model/" not in name:
            continue
        for by in {1, len(content) // 2, len(content) - 1}:
            (root / name).write_bytes(content[:-by])
            problems = inspect_step(root).problems
            assert any(name in problem for problem in problems), f"{name} without its last {by} bytes: {problems}"
        (root / name).write_bytes(content)


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    root = trees.ppo_fsdp(tmp_path, 5, world=3)
    (root / "actor/optim_world_size_3_rank_1.pt").unlink()
    assert inspect_step(root).problems == ("actor/optim_world_size_3_rank_1.pt is missing",)


def test_the_last_rank_of_all_contents_may_be_lost_too(tmp_path: Path) -> None:
    root = trees.ppo_fsdp(tmp_path, 5, world=3)
    for shard in root.glob("actor/*_rank_2.pt"):
        shard.unlink()
    assert len(inspect_step(root).problems) == 3


def test_shards_of_two_world_sizes_are_not_a_checkpoint(tmp_path: Path) -> None:
    root = trees.ppo_fsdp(tmp_path, 5, world=2)
    trees.fsdp_shards(root / "actor", world=4)
    assert inspect_step(root).problems == ("actor/ mixes shards of 2 and 4 ranks (*_world_size_W_*.pt)",)


def test_many_missing_shards_are_counted_not_listed(tmp_path: Path) -> None:
    root = trees.ppo_fsdp(tmp_path, 5, world=1)
    (root / "actor/fsdp_config.json").write_text('{"world_size": 4096}')
    for shard in root.glob("actor/*.pt"):
        shard.rename(shard.with_name(shard.name.replace("size_1", "size_4096")))
    assert len(inspect_step(root).problems) < 40


def test_a_file_padded_with_zeros_after_a_node_loss_is_damaged(tmp_path: Path) -> None:
    root = trees.ppo_fsdp(tmp_path, 5)
    shard = root / "actor/model_world_size_2_rank_0.pt"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[: size // 2].ljust(size, b"\0"))
    assert "cut short or damaged" in inspect_step(root).problems[0]


def test_an_end_record_left_inside_a_longer_file_does_not_count(tmp_path: Path) -> None:
    """`zipfile.is_zipfile` would accept this."""
    whole = trees.torch_bytes()
    path = trees.write(tmp_path / "x.pt", whole + whole[:-30])
    assert shard_files.torch_file_problem(path, path.stat().st_size)


@pytest.mark.parametrize("data", [trees.torch_bytes(), trees.torch_bytes_64()])
def test_both_forms_of_torch_archives_pass_and_no_prefix_of_them_does(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.pt"
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        assert (shard_files.torch_file_problem(path, length) is None) == (length == len(data))


def test_a_manifest_of_another_step_is_refused(tmp_path: Path) -> None:
    root = trees.ppo_megatron(tmp_path, 20)
    root.rename(tmp_path / "global_step_40")
    assert "is of step 20, not of step 40" in inspect(tmp_path).steps[0].problems[0]


def test_a_megatron_save_without_its_manifest_was_not_finished(tmp_path: Path) -> None:
    root = trees.ppo_megatron(tmp_path, 20)
    (root / "actor/ckpt_contents.json").unlink()
    assert inspect_step(root).problems == (
        "actor/ckpt_contents.json is missing (written last: this save was not finished)",
    )


def test_older_megatron_keeps_the_common_state_in_a_file_of_its_own(tmp_path: Path) -> None:
    root = trees.ppo_megatron(tmp_path, 20, hf_model=False)
    index = root / "actor/model/dist_ckpt/.metadata"
    index.write_bytes(index.read_bytes().replace(b"common_state", b"something_el"))
    assert inspect_step(root).problems == ("actor/model/dist_ckpt/common.pt is missing",)
    trees.write(root / "actor/model/dist_ckpt/common.pt", trees.torch_bytes())
    assert inspect_step(root).complete
    trees.cut(root / "actor/model/dist_ckpt/common.pt")
    assert not inspect_step(root).complete


def test_an_index_is_read_without_running_what_it_names(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    index = pickle.dumps({"x": Hostile(), "name": "__0_0.distcp"})
    assert shard_files.shards_of_index(index) == {"__0_0.distcp": 1}
    assert not (tmp_path / "ran").exists()


def test_a_huge_index_is_searched_for_names_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = trees.ppo_megatron(tmp_path, 20)
    monkeypatch.setattr(shard_files, "LARGEST_INDEX_BYTES", 10)
    assert inspect_step(root).complete
    (root / "actor/extra/dist_ckpt/__1_0.distcp").unlink()
    assert inspect_step(root).problems == ("actor/extra/dist_ckpt/__1_0.distcp is missing (named in the index)",)


def test_a_part_of_a_numbered_weight_series_is_missed_without_an_index(tmp_path: Path) -> None:
    root = trees.ppo_megatron(tmp_path, 20)
    weights = root / "actor/model/huggingface"
    (weights / "model.safetensors.index.json").unlink()
    assert inspect_step(root).complete
    (weights / "model-00001-of-00002.safetensors").unlink()
    assert inspect_step(root).problems == ("actor/model/huggingface/model-00001-of-00002.safetensors is missing",)


def test_adapters_take_the_place_of_weights(tmp_path: Path) -> None:
    root = trees.ppo_megatron(tmp_path, 20)
    weights, manifest = root / "actor/model/huggingface", root / "actor/ckpt_contents.json"
    for path in weights.glob("model*"):
        path.unlink()
    trees.write(weights / "adapter/adapter_model.safetensors", trees.safetensors_bytes())
    content = json.loads(manifest.read_text())
    content["contents"]["model"]["peft_adapter_path"] = "model/huggingface/adapter"
    trees.write(manifest, content)
    assert inspect_step(root).complete


def test_a_critic_is_held_to_the_same(tmp_path: Path) -> None:
    root = trees.ppo_fsdp(tmp_path, 5)
    trees.fsdp_shards(root / "critic")
    assert inspect_step(root).complete
    (root / "critic/extra_state_world_size_2_rank_1.pt").unlink()
    assert inspect_step(root).problems == ("critic/extra_state_world_size_2_rank_1.pt is missing",)


def test_contents_that_were_never_saved_are_absent_not_damaged(tmp_path: Path) -> None:
    root = trees.ppo_megatron(tmp_path, 20, contents=("model", "extra"))
    state = inspect_step(root, expected_contents=["model", "optimizer", "extra"])
    assert (state.problems, state.absent, state.complete) == ((), ("optimizer",), False)
    with pytest.raises(ValueError, match="optimiser"):
        inspect(tmp_path, expected_contents=["optimiser"])


def test_sft_data_files_have_no_gap(tmp_path: Path) -> None:
    root = trees.sft_fsdp(tmp_path, 5, world=4, data_ranks=4)
    (root / "data_1.pt").unlink()
    assert inspect_step(root).problems == ("data_1.pt is missing",)


def test_the_last_sft_data_file_is_missed_where_the_number_is_known_or_does_not_divide(tmp_path: Path) -> None:
    root = trees.sft_fsdp(tmp_path, 5, world=4, data_ranks=3)
    assert not inspect_step(root).complete
    (root / "data_2.pt").unlink()
    assert inspect_step(root).complete  # two data ranks of two sequence-parallel ranks each
    assert inspect_step(root, data_ranks=4).problems == ("data_2.pt is missing", "data_3.pt is missing")


def test_a_shell_is_what_verls_pruning_leaves(tmp_path: Path) -> None:
    trees.write(tmp_path / "global_step_5/data.pt", trees.torch_bytes())
    trees.ppo_fsdp(tmp_path, 6)
    shell, whole = inspect(tmp_path).steps
    assert (shell.shell, shell.complete) == (True, False)
    assert not whole.shell


def test_foreign_names_are_ignored(tmp_path: Path) -> None:
    for name in (
        "global_step_5.bak",
        "global_step_",
        "global_step_-1",
        "global_step_007",
        "xglobal_step_5",
        "global_step_5\n",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_9.deleting").mkdir()
    assert inspect(tmp_path).steps == ()
    assert inspect(tmp_path / "nowhere").steps == ()


def test_things_that_only_look_like_a_step(tmp_path: Path) -> None:
    (tmp_path / "global_step_5").write_text("a file")
    (tmp_path / "global_step_6").mkdir()
    (tmp_path / "global_step_7").symlink_to(tmp_path / "gone")
    trees.ppo_fsdp(tmp_path, 0)
    assert [(state.step, state.complete) for state in inspect(tmp_path).steps] == [
        (0, False),
        (5, False),
        (6, False),
        (7, False),
    ]


def test_a_step_moved_elsewhere_and_linked_back_counts(tmp_path: Path) -> None:
    trees.ppo_fsdp(tmp_path / "big", 5)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/global_step_5").symlink_to(tmp_path / "big/global_step_5")
    (tmp_path / "big/global_step_5/actor").rename(tmp_path / "big/actor")
    (tmp_path / "big/global_step_5/actor").symlink_to(tmp_path / "big/actor")
    (tmp_path / "big/actor/loop").symlink_to(tmp_path / "big/actor")
    (tmp_path / "big/actor/itself").symlink_to(tmp_path / "big/actor/itself")
    assert inspect(tmp_path / "ckpt").steps[0].complete


def test_hostile_file_names_stay_on_one_line(tmp_path: Path) -> None:
    root = trees.ppo_fsdp(tmp_path, 5)
    for name in ("line\nbreak.pt", "\x1b[31mred.pt", os.fsdecode(b"\xff\xfe.pt"), "a" * 200):
        (root / "actor" / name).write_bytes(b"x")
    record_sizes(root)
    for path in list((root / "actor").iterdir()):
        if path.is_file() and "world_size" not in path.name and path.suffix != ".json":
            path.unlink()
    problems = inspect_step(root).problems
    assert len(problems) == 4
    for problem in problems:
        assert problem.isprintable()
        problem.encode()


def test_a_file_system_error_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.ppo_fsdp(tmp_path, 5)

    def stale(path: Path) -> None:
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(inspection, "walk_sizes", stale)
    (state,) = inspect(tmp_path).steps
    assert state.problems == ()
    assert "Stale file handle" in state.unreadable[0]
    assert not state.complete


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_recorded_sizes_any_lost_or_changed_file_is_found(tmp_path: Path, layout: CheckpointLayout) -> None:
    root = LAYOUTS[layout](tmp_path, 20)
    record_sizes(root)
    assert inspect_step(root).recorded
    for name, content in trees.snapshot(root).items():
        if name == inspection.SIZES_NAME:
            continue
        (root / name).write_bytes(content[:-1])
        assert any(name in problem for problem in inspect_step(root).problems)
        (root / name).unlink()
        assert any(name in problem for problem in inspect_step(root).problems)
        (root / name).write_bytes(content)
    assert inspect_step(root).complete


def test_sizes_of_an_incomplete_step_are_not_recorded(tmp_path: Path) -> None:
    root = trees.ppo_fsdp(tmp_path, 20)
    trees.cut(root / "data.pt")
    with pytest.raises(CheckpointError, match=r"data\.pt is cut short"):
        record_sizes(root)
    assert not (root / inspection.SIZES_NAME).exists()


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"files": 3}', b'{"files": {"data.pt": "x"}}', b"\xff"])
def test_a_damaged_record_does_not_condemn_a_checkpoint(tmp_path: Path, garbage: bytes) -> None:
    root = trees.ppo_fsdp(tmp_path, 20)
    (root / inspection.SIZES_NAME).write_bytes(garbage)
    state = inspect_step(root)
    assert (state.complete, state.recorded) == (True, False)


def test_recording_twice_changes_nothing(tmp_path: Path) -> None:
    root = trees.ppo_fsdp(tmp_path, 20)
    record_sizes(root)
    first = (root / inspection.SIZES_NAME).read_bytes()
    record_sizes(root)
    assert (root / inspection.SIZES_NAME).read_bytes() == first


def test_recorded_files_are_not_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of shards on a parallel file system the opens are what costs."""
    root = trees.ppo_fsdp(tmp_path, 20, world=50)
    record_sizes(root)

    def never(*_: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(shard_files, "torch_file_problem", never)
    assert inspect_step(root).complete


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shard_of_zeros_at_its_recorded_size_is_found_before_a_resume(
    tmp_path: Path, layout: CheckpointLayout
) -> None:
    """So a shard looks whose size reached the disk and whose content did not."""
    LAYOUTS[layout](tmp_path, 20)
    root = LAYOUTS[layout](tmp_path, 40)
    trees.tracker(tmp_path, 40)
    record_sizes(root)
    for name, content in trees.snapshot(root).items():
        if name.endswith((".pt", ".distcp", ".safetensors")):
            (root / name).write_bytes(bytes(len(content)))
            state = inspect(tmp_path, to_resume=True)
            assert any(name in problem for problem in state.steps[-1].problems), name
            assert (state.resumable and state.resumable.step) == 20
            (root / name).write_bytes(content[:-64] + bytes(64))
            if not name.endswith(".safetensors"):
                assert any(name in problem for problem in inspect(tmp_path, to_resume=True).steps[-1].problems), name
            (root / name).write_bytes(content)
    state = inspect(tmp_path, to_resume=True)
    assert (state.resumable and state.resumable.step) == 40


@pytest.mark.parametrize("hf_model", [True, False])
def test_a_shard_of_zeros_is_never_recorded(tmp_path: Path, hf_model: bool) -> None:
    root = trees.ppo_megatron(tmp_path, 20, hf_model=hf_model)
    shard = next(path for path in sorted(root.rglob("*")) if path.suffix in (".distcp", ".safetensors"))
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CheckpointError, match=shard.name):
        record_sizes(root)


def test_every_file_is_brought_to_disk_before_its_size_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trees.ppo_fsdp(tmp_path, 20)
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    record_sizes(root)
    before = synced[: next(k for k, name in enumerate(synced) if inspection.SIZES_NAME in name)]
    names = trees.snapshot(root).keys() - {inspection.SIZES_NAME}
    assert {str(root / name) for name in names} | {str(root), str(root / "actor")} <= set(before)
