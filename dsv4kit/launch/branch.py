"""A new run that begins with a checkpoint of another one, which is only read: `submit FROM=run[@step]`.

The new run has the checkpoint's files under names of its own (hard links, or copies where there can be none): what the
other run does with its own, quarantine and pruning included, no longer matters, and to the nodes the new run is one
that has saved that step. verl and the kit never write into the files of a complete step: one that is made again is
moved away first, and what the kit replaces it replaces as a whole.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4kit.checkpoint import inspection, tracker
from dsv4kit.checkpoint.inspection import StepState
from dsv4kit.config.frozen import frozen_settings
from dsv4kit.config.loading import Override, Resolved, load_site, validate
from dsv4kit.config.schema import Settings
from dsv4kit.config.site import Site
from dsv4kit.config.tree import assign
from dsv4kit.errors import UserError
from dsv4kit.launch import changes
from dsv4kit.launch.run_dir import find_run, read_record
from dsv4kit.run import node_spec
from dsv4kit.run.directory import RunDir
from dsv4kit.run.files import sync_directory

# What the error of a hard link says where there can be none: another file system or quota, none at all, another's file.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Branch:
    """The run `parent` at a step that it has a checkpoint of; `said` is what the user wrote."""

    parent: RunDir
    step: int
    said: str

    @classmethod
    def named(cls, text: str) -> Branch:
        """From `run` (its last complete checkpoint) or `run@step`. Raises UserError for what there is not."""
        name, at, number = text.partition("@")
        said = f"FROM={text}"
        if at and not (number.isdecimal() and 0 < int(number) < 10**9):
            raise UserError(f"{said}: {number!r} is not a step; it is written FROM=run@step, for instance FROM=run@40")
        try:
            parent = find_run(name)
        except UserError as error:
            raise UserError(str(error).replace("RUN=", "FROM=", 1)) from None
        state = _checkpoints(parent)
        tracked = state.at(state.tracker.step)
        last = tracked.step if tracked and tracked.complete else state.newest_complete
        step = int(number) if at else last
        found = state.at(step)
        if step is None or found is None or not found.complete:
            complete = f"complete: {', '.join(str(one.step) for one in state.complete) or 'none'}"
            if found is not None:
                raise UserError(f"{said}: step {step} has no complete checkpoint ({found.findings[0]}); {complete}")
            of = "" if step is None else f" of step {step}"
            raise UserError(f"{said}: the run has no complete checkpoint{of}; {complete}")
        return cls(parent, step, said)

    @property
    def path(self) -> Path:
        """The parent's checkpoint."""
        directory = Path(node_spec.read_as_dict(self.parent)["checkpoint_dir"])
        return inspection.step_directory(directory, self.step)

    def as_dict(self) -> dict[str, Any]:
        """What the new run keeps of it."""
        return {"run": self.parent.name, "directory": str(self.parent.path), "step": self.step}

    def site(self, named: str | None) -> Site:
        """The named site, or the parent's."""
        site = Site.model_validate(read_record(self.parent)["site"])
        if named is None and site.name == "sandbox":  # it gets what a run needs of this machine anew
            image = site.container.image
            return load_site("sandbox").in_image(image) if image else load_site("sandbox")
        return load_site(named) if named else site

    def settings(self, chosen: dict[str, str | None], overrides: Sequence[Override]) -> Resolved:
        """The parent's settings with the user's over them. Refuses what its checkpoint cannot be loaded with.

        `chosen`: HW, MODEL and RECIPE as the user gave them.
        """
        frozen = read_record(self.parent)
        before = frozen_settings(frozen["settings"])
        own = {"HW": before.hardware.name, "MODEL": before.model.name, "RECIPE": before.recipe.name}
        for name, value in chosen.items():
            if value and value != own[name]:
                raise UserError(f"{name}={value}: {self.said} has {name}={own[name]}, and its checkpoint fits no other")
        tree, sources = before.model_dump(), dict(frozen.get("sources") or {})
        tree = assign(tree, "checkpoint.directory", None, self.said, sources)
        for override in overrides:
            tree = assign(tree, override.key, override.value, override.source, sources)
        after = validate(Settings, tree, sources)
        for key in changes.diff(before, after):
            if reason := changes.not_loadable(key, after):
                raise UserError(f"{sources.get(key, key)}: {self.said}: {reason}")
        if after.schedule.steps <= self.step:
            raise UserError(
                f"STEPS={after.schedule.steps}: {self.said} begins at step {self.step}, and STEPS is the whole run's"
            )
        missing = set(after.checkpoint.contents) - set(self._seen(self.path).contents)
        if missing:
            raise UserError(f"checkpoint.contents: {self.said}: {', '.join(sorted(missing))} is not in that checkpoint")
        return Resolved(after, sources)

    def check(self, directory: Path) -> None:
        """Refuses a directory for the new run's checkpoints that has some already."""
        if there := inspection.step_directories(directory):
            raise UserError(f"{self.said}: {str(directory)!r} has checkpoints already: {there[0].name}")

    def bring(self, directory: Path, progress: Callable[[str], None]) -> None:
        """Gives the new run's checkpoint directory the checkpoint, and the tracker that names it, last.

        Raises UserError, with nothing left of it, where it is no longer whole or has no room.
        """
        source, target = self.path, inspection.step_directory(directory, self.step)
        try:
            _link_tree(source, target, lambda line: progress(f"{self.said}: {line}"))
            state = self._seen(target)
            if not state.complete:
                raise UserError(f"{self.said}: the checkpoint is not complete any more: {state.findings[0]}")
            tracker.write_tracker(directory, self.step)
        except BaseException as error:
            self.take_back(directory)
            if isinstance(error, FileNotFoundError):
                raise UserError(f"{self.said}: the checkpoint is being removed: {error.filename} is gone") from None
            raise

    def take_back(self, directory: Path) -> None:
        """Undoes `bring`."""
        tracker.tracker_path(directory).unlink(missing_ok=True)
        shutil.rmtree(inspection.step_directory(directory, self.step), ignore_errors=True)

    def _seen(self, path: Path) -> StepState:
        return inspection.inspect_step(path, None, node_spec.read_as_dict(self.parent).get("data_ranks"))


def _checkpoints(run: RunDir) -> inspection.CheckpointState:
    spec = node_spec.read_as_dict(run)
    return inspection.inspect(Path(spec["checkpoint_dir"]), spec.get("checkpoint_contents"), spec.get("data_ranks"))


def _link_tree(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Every file of `source` below `target`, linked, or from the first one that cannot be linked on copied."""
    linking = True
    for place, directories, names in os.walk(source, onerror=_raise):
        made = target / Path(place).relative_to(source)
        made.mkdir(parents=True, exist_ok=True)
        directories.sort()
        for name in sorted(names):
            if linking:
                try:
                    os.link(Path(place, name), made / name)
                    continue
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                linking = False
                _need_room(source, target, progress)
            shutil.copy2(Path(place, name), made / name)
            with (made / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(made)


def _need_room(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    free = shutil.disk_usage(target).free
    if free < size:
        raise UserError(f"{target.parent}: {free / 1e9:.1f} GB free, a copy of {source} takes {size / 1e9:.1f}")
    progress(f"copying {size / 1e9:.1f} GB: no hard links from {source.parent} to {target.parent}")


def _raise(error: OSError) -> None:
    raise error
