"""What the image's verl has and lacks, from `features.yaml`, so that no key is guessed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from dsv4kit.config.loading import load_yaml
from dsv4kit.errors import UserError, nearest

TABLE = Path(__file__).with_name("features.yaml")


class Features(NamedTuple):
    """One row of the table; `added` and `removed` are keys of its configuration tree against the wheel's."""

    name: str
    description: str
    grad_offload: bool
    checkpoint_callback: bool
    moe_backend: str | None
    vllm_0_28: bool
    offloaded_resume: bool
    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()


@lru_cache(maxsize=1)
def table() -> dict[str, Features]:
    """All rows by name."""
    return {
        name: Features(
            **{
                "name": name,
                **row,
                "added": frozenset(row.get("added", ())),
                "removed": frozenset(row.get("removed", ())),
            }
        )
        for name, row in load_yaml(TABLE).items()
    }


def features_of(name: str) -> Features:
    """The row of that name."""
    known = table()
    if name not in known:
        raise UserError(f"engine.verl={name!r}: unknown; known: {', '.join(known)}{nearest(name, known)}")
    return known[name]
