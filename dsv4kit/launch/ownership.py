"""Whose checkpoints a directory holds: one run's. Another run's step, just being saved, would go to quarantine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4kit.errors import UserError
from dsv4kit.run.directory import RunDir, runs_below
from dsv4kit.run.files import read_json, read_object, write_json

# In the directory with the checkpoints.
OWNER = ".dsv4kit-owner.json"


def check(directory: Path, run: RunDir, named_as: str) -> None:
    """Refuses a directory that is another run's, or lies in one; `named_as` is what the user wrote."""
    directory = Path(os.path.normpath(directory))
    real = Path(os.path.realpath(directory))
    for place in dict.fromkeys([directory, *directory.parents, real, *real.parents]):
        owner: Any = read_json(place / OWNER)
        if isinstance(owner, dict) and owner.get("job_name") != run.job_name:
            home = str(owner.get("directory"))
            gone = "" if os.path.isdir(home) else f", which is gone; without {place / OWNER} it is free"
            raise UserError(
                f"{named_as}: {str(place)!r} has the checkpoints of the run {owner.get('run')} in {home}{gone}"
            )
    for other in _runs_with(directory, run.path.parent):
        if not _same(other, run.path):
            raise UserError(f"{named_as}: {str(directory)!r} has the checkpoints of the run {other.name} in {other}")


def claim(directory: Path, run: RunDir) -> bool:
    """Writes the directory's owner if it has none; returns whether it was written now. Raises as `check` does.

    The file is made whole under another name and then linked: of two that claim at once, one fails.
    """
    owner, mine = directory / OWNER, directory / f"{OWNER}.{run.job_name}"
    if owner.exists():
        check(directory, run, "checkpoint.directory")
        return False
    write_json(mine, {"run": run.name, "directory": str(run.path), "job_name": run.job_name})
    try:
        os.link(mine, owner)
    except FileExistsError:
        check(directory, run, "checkpoint.directory")
        return False
    except OSError:  # no hard links here
        mine.rename(owner)
    finally:
        mine.unlink(missing_ok=True)
    return True


def _runs_with(directory: Path, root: Path) -> Iterator[Path]:
    """Runs below `root` whose nodes were told this directory: those from before there were owners, too."""
    for run in runs_below(root):
        there = read_object(run.node_spec_file).get("checkpoint_dir")
        if isinstance(there, str) and (
            os.path.normpath(there) == os.path.normpath(directory) or _same(there, directory)
        ):
            yield run.path


def _same(one: str | Path, other: str | Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False
