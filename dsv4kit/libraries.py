"""The libraries that the code on the nodes needs: submitit and what it imports, copied beside that code."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

from dsv4kit.errors import UserError

_NAMES = ("submitit", "cloudpickle", "typing_extensions")


def copy_to(destination: Path, copy_directory: Callable[[Path, Path], object]) -> None:
    """Puts them into `destination`; `copy_directory(source, target)` copies one that is a package."""
    for name in _NAMES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise UserError(f"{name}: not installed; `make setup` installs it")
        source = Path(spec.origin)
        if source.name == "__init__.py":
            copy_directory(source.parent, destination / name)
        else:
            shutil.copy2(source, destination)
