"""The run's own copy of what its nodes execute, so that a run never changes code halfway and any image can run it."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from pathlib import Path

from dsv4kit import libraries
from dsv4kit.config.paths import ROOT
from dsv4kit.config.schema import Settings
from dsv4kit.run.directory import RunDir

# The standard library (and submitit) is all they import.
_PACKAGES = ("checkpoint", "node", "plugin", "run")
# An empty directory beside the packages: where a node without pyxis mounts the image, in a namespace of its own.
IMAGE_MOUNT = ".image"
# Where Python looks for it: beside the packages, not in one.
FIRST = "sitecustomize.py"


def freeze(destination: Path) -> None:
    """Copies the node runtime to `destination`, which is put on PYTHONPATH in the job."""
    package = destination / "dsv4kit"
    package.mkdir(parents=True)
    (destination / IMAGE_MOUNT).mkdir()
    shutil.copy2(ROOT / "dsv4kit" / "__init__.py", package)
    for name in _PACKAGES:
        _copy(ROOT / "dsv4kit" / name, package / name)
    (package / "node" / FIRST).rename(destination / FIRST)
    libraries.copy_to(destination, _copy)


def reward_file(settings: Settings) -> Path | None:
    """The file with a reward function of the user's; None where there is none, or it is a module of the image."""
    path = settings.reward.function_path
    return None if path is None or "://" in path else Path(path)


def freeze_reward(settings: Settings, run: RunDir) -> None:
    """Copies the user's reward function into the run, so that a run never changes it halfway."""
    if (source := reward_file(settings)) is not None:
        run.own.mkdir()
        shutil.copy2(source, run.own / source.name)


def with_frozen_reward(settings: Settings, run: RunDir) -> Settings:
    """The settings as the run's trainer is told them: with its own copy of the reward function."""
    if (source := reward_file(settings)) is None:
        return settings
    reward = settings.reward.model_copy(update={"function_path": str(run.own / source.name)})
    return settings.model_copy(update={"reward": reward})


def renew(kit: Path, back: contextlib.ExitStack) -> None:
    """Puts this clone's node runtime in the place of the run's, which stays beside it; `back` undoes it.

    The caller says `renewed` once the run's `node.json` is for this kit, too; killed before, it is `half_renewed`.
    """
    made = _made(kit)
    shutil.rmtree(made, ignore_errors=True)
    number = next(number for number in itertools.count(1) if not kit.with_name(f"{kit.name}.{number}").exists())
    old = kit.with_name(f"{kit.name}.{number}")
    try:
        freeze(made)
        _mark(kit).touch()
        if kit.exists():
            kit.rename(old)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        if kit.exists():
            _mark(kit).unlink(missing_ok=True)
        raise
    back.callback(_put_back, old, kit)
    made.rename(kit)


def renewed(kit: Path) -> None:
    """The run's nodes are told what this kit wants to know."""
    _mark(kit).unlink(missing_ok=True)


def half_renewed(kit: Path) -> bool:
    """Whether a `renew` was killed: the run may have no kit, or one that does not understand its `node.json`."""
    return _mark(kit).exists()


def _made(kit: Path) -> Path:
    return kit.with_name(f".{kit.name}.new")


def _mark(kit: Path) -> Path:
    return kit.with_name(f".{kit.name}.renewing")


def _put_back(old: Path, kit: Path) -> None:
    if old.exists():
        shutil.rmtree(kit, ignore_errors=True)
        old.rename(kit)
        _mark(kit).unlink(missing_ok=True)
    else:  # the one before was killed with the old kit already set aside: the next one has to finish it
        _mark(kit).touch()


def _copy(source: Path, destination: Path) -> None:
    """A directory. The first file that cannot be written ends it; `shutil.copytree` would go on and list them all."""
    destination.mkdir()
    for path in sorted(source.iterdir()):
        if path.name == "__pycache__" or path.name.startswith("test_") or path.suffix == ".pyc":
            continue
        if path.is_dir():
            _copy(path, destination / path.name)
        else:
            shutil.copy2(path, destination)
