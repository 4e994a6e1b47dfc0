"""What happens to a checkpoint directory before every segment, so that verl resumes from the right step.

verl's own `resume_mode=auto` trains silently from scratch where the tracker is missing or names a directory that is
gone, and dies on an empty tracker (utils/checkpoint/checkpoint_manager.py `find_latest_ckpt_path`). It also saves in
place: a half-written `global_step_N` of a killed attempt keeps its old manifest while its shards are replaced. So:

* the step to resume from is the one the tracker names; where that is not complete, the newest complete one;
* everything newer, and everything broken, is moved to a quarantine, never deleted;
* a run that has saved before is never started over, unless the user says so.

`decide` is pure. `prepare_resume` carries its decision out, the tracker first: that one rename commits the decision,
and a rerun after an interruption at any later point comes to the same step.

Standard library only; used on the compute nodes. One process per run may call it (node 0 of a segment).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.checkpoint.inspection import CheckpointError, CheckpointLayout, CheckpointState, StepState, inspect
from dsv4kit.checkpoint.shard_files import show
from dsv4kit.checkpoint.tracker import tracker_path, write_tracker
from dsv4kit.run.files import sync_directory

LOCAL_QUARANTINE_NAME = ".quarantine"
"""Where things go that cannot be renamed into the run's quarantine: a directory inside the checkpoint directory.

A sibling would not do: two mount points of one file system, and on Lustre or XFS two project quotas, refuse a rename
too (EXDEV), and beside a mount point lies the container's own throw-away layer.
"""


class CheckpointLost(CheckpointError):  # noqa: N818 (says what happened)
    """The run has saved before and no complete checkpoint is left. Nothing was touched."""


class CheckpointMismatch(CheckpointError):  # noqa: N818
    """A whole checkpoint that this segment's settings cannot load. Nothing was touched."""


@dataclass(frozen=True)
class Quarantine:
    """One thing to move away: `step` None is the tracker itself."""

    step: int | None
    path: Path
    reason: str


@dataclass(frozen=True)
class Decision:
    """The step to start from (0: from scratch), and what has to be done to the directory first.

    `fell_back_from`: the highest step known to have been saved, where the start lies below it without the user's wish.
    """

    start_step: int
    write_tracker: bool
    quarantine: tuple[Quarantine, ...]
    fell_back_from: int | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResumeDecision:
    """What `prepare_resume` decided and did; `actions` are readable lines, in the order they were done."""

    start_step: int
    actions: tuple[str, ...]
    fell_back_from: int | None = None

    @property
    def from_scratch(self) -> bool:
        return self.start_step == 0


def decide(
    state: CheckpointState,
    *,
    high_water_step: int = 0,
    from_step: int | None = None,
    allow_restart: bool = False,
    world_size: int | None = None,
) -> Decision:
    """Which step to resume from, and what to move away. Pure: looks at `state` only.

    `high_water_step`: the highest step the run is known to have saved (0: none). `from_step`: the user's wish to go on
    from an older step; 0, together with `allow_restart`, from scratch. `allow_restart`: starting over is accepted where
    no complete checkpoint is left. `world_size`: ranks of this segment; FSDP shards load on their own number only.

    Raises CheckpointLost, CheckpointMismatch, or CheckpointError (a wish that cannot be met; a step that cannot be read
    just now and would be passed over).
    """
    tracker, remarks = state.tracker, []
    saved_up_to = max([high_water_step, tracker.step or 0, *(step.step for step in state.complete)])
    has_saved = saved_up_to > 0 or tracker.exists or any(step.recorded for step in state.steps)

    if from_step is not None:
        start = _wished(state, from_step, has_saved, allow_restart)
        remarks.append(f"going on from step {start} as asked" if start else "starting over as asked")
    else:
        start = state.resumable.step if state.resumable else 0
        _refuse_if_unclear(state, start)
        if start == 0 and has_saved:
            evidence = _evidence(state, high_water_step)
            if not allow_restart:
                raise CheckpointLost(
                    f"the run has saved checkpoints, but none in {state.directory} is complete;"
                    " not starting over from step 0 without being told to",
                    evidence,
                )
            remarks.append("no complete checkpoint is left: starting over from step 0 as allowed")
        if start and tracker.step != start:
            remarks.append(f"resuming from step {start}, the newest complete one: {_tracker_problem(state)}")

    chosen = state.at(start)
    if chosen and world_size and chosen.world_size and chosen.world_size != world_size and _is_fsdp(chosen):
        raise CheckpointMismatch(
            f"{chosen.path} was saved by {chosen.world_size} ranks and this segment has {world_size}:"
            " FSDP checkpoints load on the same number of ranks only"
        )

    moves = []
    if start == 0 and tracker.exists:
        moves.append(Quarantine(None, tracker_path(state.directory), "the run starts over"))
    for step in state.steps:
        if step.step > start:
            moves.append(Quarantine(step.step, step.path, _why_newer(step, start, tracker.step)))
        elif step.problems and not step.shell:
            moves.append(Quarantine(step.step, step.path, f"not complete: {step.problems[0]}"))
    return Decision(
        start_step=start,
        write_tracker=start > 0 and tracker.step != start,
        quarantine=tuple(moves),
        fell_back_from=saved_up_to if from_step is None and start < saved_up_to else None,
        remarks=tuple(remarks),
    )


def prepare_resume(
    directory: Path,
    quarantine_dir: Path,
    *,
    high_water_step: int = 0,
    expected_contents: Collection[str] | None = None,
    data_ranks: int | None = None,
    from_step: int | None = None,
    allow_restart: bool = False,
    world_size: int | None = None,
) -> ResumeDecision:
    """Make `directory` ready for verl's `resume_mode=auto`, and say from which step it will resume.

    Arguments as for `checkpoints.inspect` and `decide`. What `decide` refuses leaves the directory untouched. May be
    interrupted anywhere and run again. Raises CheckpointError also where the directory cannot be read or written.
    """
    directory, quarantine_dir = directory.absolute(), quarantine_dir.absolute()
    try:
        state = inspect(directory, expected_contents, data_ranks, to_resume=True, wished=from_step)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint directory {_describe(error, directory)}") from error
    decision = decide(
        state,
        high_water_step=high_water_step,
        from_step=from_step,
        allow_restart=allow_restart,
        world_size=world_size,
    )
    actions = list(decision.remarks)
    try:
        _require_writable(directory)
        if decision.write_tracker:
            _clear_false_tracker(directory, quarantine_dir, actions)
            write_tracker(directory, decision.start_step)
            was = state.tracker.problem or f"it named step {state.tracker.step}"
            actions.append(f"tracker set to step {decision.start_step} ({was})")
        for move in decision.quarantine:
            target = move_to_quarantine(move.path, quarantine_dir)
            actions.append(f"moved {show(move.path.name)} to {target}: {move.reason}")
    except OSError as error:
        raise CheckpointError(
            f"cannot write in the checkpoint directory {_describe(error, directory)}", actions
        ) from error
    if decision.fell_back_from:
        actions.append(f"fell back from step {decision.fell_back_from} to step {decision.start_step}")
    return ResumeDecision(decision.start_step, tuple(actions), decision.fell_back_from)


def move_to_quarantine(path: Path, quarantine_dir: Path) -> Path:
    """Rename `path` into `quarantine_dir` under a name not used there (`global_step_40.1`, `.2`, ...); the new path.

    On another file system (EXDEV) it goes to `.quarantine` beside it instead: nothing is ever copied or deleted.
    """
    for place in (quarantine_dir, path.parent / LOCAL_QUARANTINE_NAME):
        os.makedirs(place, exist_ok=True)
        number = 1
        while os.path.lexists(target := place / f"{path.name}.{number}"):
            number += 1
        try:
            os.rename(path, target)
        except OSError as error:
            if error.errno != errno.EXDEV or place != quarantine_dir:
                raise
            continue
        sync_directory(place)
        sync_directory(path.parent)
        return target
    raise AssertionError("unreachable")


def _wished(state: CheckpointState, step: int, has_saved: bool, allow_restart: bool) -> int:
    if step == 0:
        if has_saved and not allow_restart:
            raise CheckpointLost("starting over from step 0 gives up what was saved; it has to be allowed explicitly")
        return 0
    wished = state.at(step)
    if wished is None or not wished.complete:
        usable = ", ".join(str(other.step) for other in state.complete) or "none"
        found = wished.findings if wished else (f"there is no global_step_{step} in {state.directory}",)
        raise CheckpointError(f"cannot go on from step {step}; complete steps: {usable}", found)
    return step


def _refuse_if_unclear(state: CheckpointState, start: int) -> None:
    """A step that may be good, but cannot be read now or lacks an expected content, is not passed over."""
    if start and start == state.tracker.step:
        return
    for step in reversed(state.steps):
        if step.step <= start:
            break
        if step.unreadable:
            raise CheckpointError(f"{step.path} cannot be read; not falling back to an older step", step.unreadable)
        if step.absent:
            raise CheckpointMismatch(
                f"{step.path} is whole but does not hold {', '.join(step.absent)}, which this segment is to load"
                f" (it holds {', '.join(step.contents) or 'nothing'}); change load_contents or name an older step"
            )


def _tracker_problem(state: CheckpointState) -> str:
    tracker = state.tracker
    if tracker.step is None:
        return str(tracker.problem)
    named = state.at(tracker.step)
    if named is None:
        return f"the tracker names step {tracker.step}, which is gone"
    return f"the tracker names step {tracker.step}, which is not complete: {'; '.join(named.findings[:3])}"


def _evidence(state: CheckpointState, high_water_step: int) -> list[str]:
    lines = [f"highest step known to be saved: {high_water_step}"] if high_water_step else []
    tracker = state.tracker
    lines.append(f"tracker: {tracker.problem or f'names step {tracker.step}'}")
    for step in state.steps:
        lines += [f"{step.path.name}: {finding}" for finding in step.findings[:3]]
    return lines + ([] if state.steps else [f"there is no global_step_* in {state.directory}"])


def _why_newer(step: StepState, start: int, tracked: int | None) -> str:
    if step.problems:
        return f"not complete: {step.problems[0]}"
    return f"newer than step {start}" + (", which the tracker names" if tracked == start else "")


def _is_fsdp(step: StepState) -> bool:
    return step.layout in (CheckpointLayout.PPO_FSDP, CheckpointLayout.SFT_FSDP)


def _require_writable(directory: Path) -> None:
    """Find a read-only mount or a full quota now, not at the first save hours later. Raises OSError."""
    os.makedirs(directory, exist_ok=True)
    probe = directory / ".dsv4kit.probe"
    with open(probe, "wb") as file:
        file.write(b"probe")
        file.flush()
        os.fsync(file.fileno())
    os.unlink(probe)


def _clear_false_tracker(directory: Path, quarantine_dir: Path, actions: list[str]) -> None:
    """A directory in the tracker's place would withstand the rename."""
    tracker = tracker_path(directory)
    if tracker.is_dir() and not tracker.is_symlink():
        actions.append(f"moved {tracker.name} to {move_to_quarantine(tracker, quarantine_dir)}: it is a directory")


def _describe(error: OSError, directory: Path) -> str:
    return f"{directory}: {error.strerror or error}" + (f" ({show(str(error.filename))})" if error.filename else "")
