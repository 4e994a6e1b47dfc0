"""Merging settings trees while remembering where every value came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Tree = dict[str, Any]

# Below these keys stand names of others, dots and all: they are one level deep.
FLAT = ("env", "plugins", "verl")


def merge(base: Tree, layer: Mapping[str, Any], source: str, sources: dict[str, str], prefix: str = "") -> Tree:
    """`base` with `layer` on top; `sources` gets dotted key -> `source` for every value the layer sets."""
    merged = dict(base)
    for key, value in layer.items():
        dotted = f"{prefix}{key}"
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, dict | None):
            merged[key] = merge(below or {}, value, source, sources, f"{dotted}.")
        else:
            merged[key] = value
            sources[dotted] = source
    return merged


def assign(tree: Tree, dotted: str, value: object, source: str, sources: dict[str, str]) -> Tree:
    """`tree` with one dotted key set."""
    head, _, rest = dotted.partition(".")
    parts = [head, rest] if head in FLAT and rest else dotted.split(".")
    layer: Any = value
    for part in reversed(parts):
        layer = {part: layer}
    return merge(tree, layer, source, sources)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value in the tree."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
