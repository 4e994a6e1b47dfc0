"""Whether a build has room, asked before it begins."""

from __future__ import annotations

import shutil
from pathlib import Path

from dsv4kit.errors import UserError

# GB (1e9 bytes): (what an engine's storage grows by, the squashfs). cpu: 3.4 of layers and 1.0 were measured; the rest
# is for the wheels while pip installs them. cuda: estimated: a CUDA development base of 10, 15 of packages, the same
# again while layers are written, compilers' scratch; zstd halves what is inside.
_NEEDS_GB = {"cpu": (5.0, 1.5), "cuda": (80.0, 20.0)}
# Of a build by a job: wheels and compilers' scratch on the node's disk; the container's own files are enroot's.
_SCRATCH_GB = {"cpu": 4.0, "cuda": 40.0}


def scratch(device: str) -> float:
    """GB of temporary files on the node where a job builds an image of that device."""
    return _SCRATCH_GB[device]


def needs(device: str) -> tuple[float, float]:
    """(GB of storage, GB of the squashfs) for an image of that device."""
    return _NEEDS_GB[device]


def require(wanted: dict[Path, float]) -> None:
    """Refuses where a directory has less room than its number of GB; directories of one file system share it."""
    by_device: dict[int, tuple[list[Path], float]] = {}
    for path, size in wanted.items():
        here = next(part for part in (path, *path.parents) if part.exists())
        paths, total = by_device.get(here.stat().st_dev, ([], 0.0))
        by_device[here.stat().st_dev] = ([*paths, here], total + size)
    for paths, total in by_device.values():
        free = shutil.disk_usage(paths[0]).free / 1e9
        if free < total:
            raise UserError(f"{' and '.join(map(str, paths))}: {total:.0f} GB are needed, {free:.1f} GB are free")
