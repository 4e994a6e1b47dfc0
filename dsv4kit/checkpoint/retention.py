"""Which old checkpoints may go. verl's own pruning forgets everything at a restart and leaves shells (`data.pt` alone).

Kept: the step the tracker names, the last K complete ones up to it, and milestones. Steps newer than the tracker are
being written, or are for `checkpoint_repair` to judge; broken ones are evidence, and it moves them to the quarantine.
Neither is deleted here. Where the tracker's own step is not complete, nothing is.

Standard library only; used on the compute nodes, also while verl saves the next step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from dsv4kit.checkpoint.inspection import CheckpointState
from dsv4kit.checkpoint.shard_files import show
from dsv4kit.checkpoint.tracker import read_tracker

DELETING_SUFFIX = ".deleting"
KEEP_NAME = "keep"
"""A file of this name in a step's directory, or one that begins with `keep.`, keeps the step from being deleted."""


def retention_plan(
    state: CheckpointState, keep_last: int, milestone_every: int | None = None, keep: Collection[int] = ()
) -> list[Path]:
    """Step directories to delete, oldest first. Pure.

    `keep_last` (>= 1): complete steps to keep, the tracker's included. `milestone_every`: also keep the complete steps
    divisible by it. `keep`: steps to keep in any case.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is at least 1, not {keep_last}")
    if milestone_every is not None and milestone_every < 1:
        raise ValueError(f"milestone_every is at least 1, not {milestone_every}")
    current = state.at(state.tracker.step)
    if current is None or not current.complete:
        return []
    settled = [step for step in state.complete if step.step <= current.step]
    kept = {step.step for step in settled[-keep_last:]} | set(keep) | {current.step}
    if milestone_every:
        kept |= {step.step for step in settled if step.step % milestone_every == 0}
    surplus = [step for step in state.steps if step.step < current.step and step.step not in kept]
    return [step.path for step in surplus if step.complete or (step.shell and not step.unreadable)]


def kept_because(
    state: CheckpointState, keep_last: int, milestone_every: int | None = None, best: Collection[int] = ()
) -> dict[int, list[str]]:
    """Why each step stays, by step; one with no reason is in the retention plan of the same arguments."""
    settled = [step.step for step in state.complete if step.step <= (state.tracker.step or 0)]
    going = {path.name for path in retention_plan(state, keep_last, milestone_every, best)}
    found = {}
    for step in state.steps:
        why = []
        if step.step == state.tracker.step:
            why.append("the run goes on from it")
        if step.step in settled[-keep_last:]:
            why.append(f"of the last {keep_last}")
        if milestone_every and step.complete and step.step % milestone_every == 0:
            why.append(f"a multiple of {milestone_every}")
        if step.step in best:
            why.append("of the best")
        if not step.unreadable and is_protected(step.path):
            why.append("has a keep file")
        if not why and step.path.name not in going:
            why.append("newer than the tracker's" if step.complete else "not complete")
        found[step.step] = why
    return found


def apply_retention(
    directory: Path, surplus: Collection[Path], spared: Callable[[], Collection[int] | None] = tuple
) -> list[str]:
    """Delete the directories of a plan; returns readable lines, failures included: pruning never ends a run.

    Each is renamed to `<name>.deleting` first, so that a half-deleted directory is never taken for a checkpoint; what
    an interrupted call left under such names is deleted too. Asked again right before each: the step that the tracker
    names is spared, and those that `spared` gives (None: nothing more is deleted, `<name>.deleting` excepted). A step
    with a `keep` file is spared too, also where the file came at the very moment: it is looked for again after the
    rename, which is then taken back.
    """
    done: list[str] = []
    for path in surplus:
        if path.parent != directory:
            raise ValueError(f"{path} is not in {directory}")
        keep = spared()
        if keep is None:
            break
        try:
            if line := _rename(path, keep):
                done.append(line)
        except FileNotFoundError:
            continue
        except OSError as error:
            done.append(f"could not delete {show(path.name)}: {error.strerror or error}")
    return [*done, *delete_leftovers(directory)]


def delete_leftovers(directory: Path) -> list[str]:
    """Delete what is named `<step>.deleting`; readable lines."""
    done: list[str] = []
    try:
        leftovers = sorted(name for name in os.listdir(directory) if _is_doomed(name))
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"could not list {directory}: {error.strerror or error}"]
    for name in leftovers:
        try:
            _remove(directory / name)
            done.append(f"deleted {show(name.removesuffix(DELETING_SUFFIX))}")
        except FileNotFoundError:
            continue
        except OSError as error:
            done.append(f"could not delete all of {show(name)}: {error.strerror or error}")
    return done


def is_protected(path: Path) -> bool:
    """Whether somebody wants this step kept. Raises OSError."""
    return any(name == KEEP_NAME or name.startswith(f"{KEEP_NAME}.") for name in os.listdir(path))


def _rename(path: Path, keep: Collection[int]) -> str | None:
    """Take one step out of sight; a line where it is spared instead."""
    tracked = read_tracker(path.parent)
    if tracked is None or path.name == f"global_step_{tracked}":
        return f"kept {show(path.name)}: the tracker names {tracked or 'no step'} by now"
    if any(path.name == f"global_step_{step}" for step in keep) or is_protected(path):
        return None
    doomed = path.with_name(path.name + DELETING_SUFFIX)
    if os.path.lexists(doomed):
        _remove(doomed)
    os.rename(path, doomed)
    if path.name == f"global_step_{read_tracker(path.parent)}" or is_protected(doomed):
        os.rename(doomed, path)
    return None


def _is_doomed(name: str) -> bool:
    step = name.removeprefix("global_step_").removesuffix(DELETING_SUFFIX)
    return step.isdecimal() and step.isascii() and name == f"global_step_{step}{DELETING_SUFFIX}"


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        os.unlink(path)
    else:
        shutil.rmtree(path)
