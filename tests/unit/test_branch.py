"""A run that begins with another one's checkpoint: `submit FROM=run[@step]`, with a queue of files for Slurm."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_trees as trees
import pytest
from file_queue import Cluster

from dsv4kit.checkpoint import inspection, tracker
from dsv4kit.config.loading import Override
from dsv4kit.errors import UserError
from dsv4kit.launch.branch import Branch
from dsv4kit.launch.run_dir import read_record
from dsv4kit.launch.state import read_state
from dsv4kit.launch.submission import Submission
from dsv4kit.run.directory import RunDir

LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture
def parent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints of the run `first`: steps 4 and 8 are complete, 10 was being saved."""
    monkeypatch.setenv("DSV4KIT_RUNS", str(cluster.run.path.parent))
    cluster.submit()
    directory = cluster.run.checkpoints
    for step in (4, 8, 10):
        trees.ppo_fsdp(directory, step)
    shutil.rmtree(directory / "global_step_10" / "actor")
    (directory / "global_step_10" / "actor").mkdir()
    trees.tracker(directory, 8)
    return directory


def branched(cluster: Cluster, text: str, *overrides: Override, name: str = "second") -> Submission:
    branch = Branch.named(text)
    resolved = branch.settings({}, overrides)
    run = RunDir(cluster.run.path.with_name(name))
    return Submission(
        resolved, branch.site(None), run, cluster.slurm, "python3", "/m", "/d", first_step=branch.step, branch=branch
    )


def everything(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Path -> time of its last change and content."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_it_begins_with_the_step_and_the_settings_of_the_other_run_which_stays_as_it_was(
    cluster: Cluster, parent: Path
) -> None:
    before = everything(cluster.run.path)
    submission = branched(cluster, "first@4", Override(f"verl.{LR}", 1e-7, f"VERL {LR}"))
    submission.check()
    submission.submit(lambda line: None)
    run = submission.run
    assert everything(cluster.run.path) == before
    assert submission.segments == 2  # of 12 steps in segments of 4, the first is the other run's
    state = read_state(run, cluster.slurm)
    assert (state.state, state.saved_step, state.total_steps) == ("waiting", 4, 12)
    assert state.origin == {"run": "first", "directory": str(cluster.run.path), "step": 4}
    assert read_record(run)["from"] == state.origin
    assert read_record(run)["settings"]["verl"][LR] == 1e-7
    (step,) = inspection.inspect(run.checkpoints).complete
    assert step.step == tracker.read_tracker(run.checkpoints) == 4
    shard = run.checkpoints / "global_step_4" / "data.pt"
    assert shard.samefile(parent / "global_step_4" / "data.pt")
    shutil.rmtree(cluster.run.path)
    assert inspection.inspect(run.checkpoints).complete == (step,)


def test_without_a_step_the_last_complete_one_is_meant(cluster: Cluster, parent: Path) -> None:
    assert Branch.named("first").step == 8
    trees.tracker(parent, "")
    assert Branch.named("first").step == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("frist", r"FROM='frist': no such run in .*\(did you mean 'first'\?\)"),
        ("first@6", "FROM=first@6: the run has no complete checkpoint of step 6; complete: 4, 8"),
        ("first@10", r"FROM=first@10: step 10 has no complete checkpoint \(.*\); complete: 4, 8"),
        ("first@x", "FROM=first@x: 'x' is not a step; it is written FROM=run@step"),
        ("first@", "FROM=first@: '' is not a step"),
        ("@4", "FROM='': a run's name has letters"),
    ],
)
def test_what_there_is_not_is_one_line(cluster: Cluster, parent: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Branch.named(text)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("schedule.nodes", 1, "FROM=first@4: FSDP's checkpoints have one file per process"),
        ("optimizer.cpu_offload", True, "the run's checkpoints hold the optimizer's state"),
        ("model.proxy", "dsv4-pro-4l", "a checkpoint goes on with its own model only"),
        ("schedule.steps", 4, "STEPS=4: FROM=first@4 begins at step 4, and STEPS is the whole run's"),
    ],
)
def test_what_its_checkpoint_cannot_be_loaded_with_is_refused(
    cluster: Cluster, parent: Path, key: str, value: Any, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        Branch.named("first@4").settings({}, [Override(key, value, f"SET {key}")])


def test_another_model_is_refused(cluster: Cluster, parent: Path) -> None:
    with pytest.raises(UserError, match="MODEL=dsv4-pro: FROM=first has MODEL=tiny, and its checkpoint fits no other"):
        Branch.named("first").settings({"HW": "cpu", "MODEL": "dsv4-pro"}, [])


def test_files_that_cannot_be_linked_are_copied(
    cluster: Cluster, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(source: Any, target: Any, **options: Any) -> None:
        if "global_step" in str(source):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(source, target, **options)

    monkeypatch.setattr(os, "link", link)
    said: list[str] = []
    submission = branched(cluster, "first@8")
    submission.submit(said.append)
    assert said[0].startswith("FROM=first@8: copying 0.0 GB: no hard links from ")
    copied = submission.run.checkpoints / "global_step_8" / "data.pt"
    assert copied.read_bytes() == (parent / "global_step_8" / "data.pt").read_bytes()
    assert not copied.samefile(parent / "global_step_8" / "data.pt")


def test_a_checkpoint_that_is_pruned_meanwhile_leaves_nothing(cluster: Cluster, parent: Path) -> None:
    submission = branched(cluster, "first@4")
    (parent / "global_step_4" / "data.pt").unlink()
    with pytest.raises(UserError, match=r"the checkpoint is not complete any more: data\.pt is missing"):
        submission.submit(lambda line: None)
    assert [path.name for path in cluster.run.path.parent.iterdir()] == ["first"]


def test_a_directory_of_its_own_is_as_before_after_a_refusal(cluster: Cluster, parent: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    submission = branched(cluster, "first", Override("checkpoint.directory", str(own), "SET checkpoint.directory"))
    (cluster.root / "refuse").write_text("4")
    (cluster.root / "reasons").write_text("sbatch: error: no")
    with pytest.raises(UserError, match="refused segment 1"):
        submission.submit(lambda line: None)
    assert list(own.iterdir()) == []
    trees.ppo_fsdp(own, 2)
    with pytest.raises(UserError, match="has checkpoints already: global_step_2"):
        submission.check()


def test_the_verb_takes_it_and_status_shows_it(cluster: Cluster, say: Callable[..., str]) -> None:
    trees.ppo_fsdp(cluster.run.checkpoints, 4)
    words = ["--from=first@4", "--run=third", f"--verl={LR}=1e-7", "--steps=8", "--no-follow"]
    said = say("submit", *words)
    assert "8 steps in 1 segments of 4" in said
    assert "; from step 4 of the run first\n" in said
    assert "began with step 4 of the run first" in say("status", "third")
    assert json.loads(say("status", "third", "--json").removeprefix("0 "))["origin"]["step"] == 4
    assert say("submit", "--from=first@4", "--hw=h100").startswith("2 dsv4kit: HW=h100: FROM=first@4 has HW=cpu")
