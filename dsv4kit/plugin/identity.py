"""What identifies a sample and a prompt in a deterministic run: seeds, ids and order. Standard library only."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any


def sample_seed(base: int, step: int, index: int | str, sample: int, messages: Iterable[Mapping[str, Any]]) -> int:
    """The seed of one sample: a function of what identifies it, never of when or where it runs.

    `step` makes a prompt that comes again draw anew, `index` and `messages` tell prompts apart, `sample` the n samples
    of one prompt. 63 bits: vLLM takes a signed 64-bit number.
    """
    identity = json.dumps([int(base), int(step), str(index), int(sample), [dict(m) for m in messages]], default=str)
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big") >> 1


def trajectory_order(key: str) -> tuple[str, tuple[int, ...]]:
    """Sort key for verl's trajectory keys, `{uid}_{session}_{output}`: the numbers count as numbers."""
    uid, *numbers = key.split("_")
    return uid, tuple(int(number) for number in numbers)


class DispatchOrderUuid:
    """Stands in for the module `uuid`: ids count up, so that sorting by id is sorting by order of dispatch."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def uuid4(self) -> str:
        """The next id: of fixed width, and without the `_` that separates the parts of a trajectory key."""
        return f"prompt{next(self._next):012d}"
