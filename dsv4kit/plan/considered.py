"""Which of verl's keys the planner takes into account, and which of those that are set it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dsv4kit import yaml_text
from dsv4kit.config.tree import leaves

TABLE = Path(__file__).with_name("considered.yaml")
# Values that leave a thing off.
_OFF: tuple[object, ...] = (None, False, 0, -1, "", "none", "null", "disabled")


class Answer(NamedTuple):
    """What the planner does with a key: in a formula (`modelled`), of no weight (`harmless`), or `not_considered`.

    `effect` says of the last what it changes.
    """

    kind: str
    effect: str = ""


class _Table(NamedTuple):
    whole: Mapping[str, Answer]
    patterns: tuple[tuple[str, ...], ...]


@lru_cache(maxsize=1)
def _table() -> _Table:
    content: Mapping[str, Any] = yaml_text.parse(TABLE.read_text(encoding="utf-8"))
    whole = {pattern: Answer(kind) for kind in ("modelled", "harmless") for pattern in content[kind]}
    whole |= {pattern: Answer("not_considered", effect) for pattern, effect in content["not_considered"].items()}
    patterns = sorted((pattern for pattern in whole if "*" in pattern), key=len, reverse=True)
    return _Table(whole, tuple(tuple(pattern.split("*")) for pattern in patterns))


def _matches(key: str, parts: tuple[str, ...]) -> bool:
    first, *middle, last = parts
    if not key.startswith(first):
        return False
    position = len(first)
    for part in middle:
        position = key.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return key.endswith(last) and len(key) - len(last) >= position


def answer(key: str) -> Answer | None:
    """What the planner does with verl's key; None for one it has no answer to."""
    table = _table()
    if key in table.whole:
        return table.whole[key]
    return next((table.whole["*".join(parts)] for parts in table.patterns if _matches(key, parts)), None)


def not_considered(verl: Mapping[str, Any]) -> Iterator[str]:
    """Of the raw keys those that change memory or time and are in no formula, each with what it changes."""
    for key, value in leaves(verl):
        if value in _OFF:
            continue
        found = answer(key)
        if found is None or found.kind == "not_considered":
            yield f"{key} ({found.effect})" if found else key
