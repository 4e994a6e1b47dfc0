"""Whether the bytes of a checkpoint are still those that were there: its files' hashes, recorded and compared.

Sizes are recorded at each save; hashes only on request, because reading a checkpoint of Pro takes minutes.

Standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dsv4kit.checkpoint.inspection import SIZES_NAME
from dsv4kit.checkpoint.shard_files import show, walk_sizes
from dsv4kit.run.files import is_version_of, read_object, write_json

NAME = "dsv4kit.sha256.json"
# A shared file system gives more to several readers than to one.
_READERS = 8


def verify(step: Path, progress: Callable[[int], object]) -> tuple[list[str], bool]:
    """(findings, whether the hashes were written down just now) of a `global_step_N`; `progress` is told bytes read.

    The first call records; every later one compares with that record. Raises OSError.
    """
    names = [name for name in walk_sizes(step) if not any(is_version_of(name, own) for own in (NAME, SIZES_NAME))]
    with ThreadPoolExecutor(_READERS) as readers:
        found = dict(zip(names, readers.map(lambda name: _sha256(step / name, progress), names), strict=True))
    recorded = read_object(step / NAME)
    if not recorded:
        write_json(step / NAME, found)
        return [], True
    first = "when it was first verified"
    both, gone = recorded.keys() & found.keys(), recorded.keys() - found.keys()
    changed = [f"{show(name)} has other bytes than {first}" for name in both if recorded[name] != found[name]]
    return sorted([*changed, *(f"{show(name)} is missing (it was there {first})" for name in gone)]), False


def _sha256(path: Path, progress: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()
