"""YAML as every file of the kit is read: plain values, each key once, and no alias that makes a file endless."""

from __future__ import annotations

from typing import Any

import yaml

# More than any settings file needs, and read in no time: nine aliases of nine aliases of ... are 10^9 values.
_MOST_VALUES = 100_000


class YamlError(ValueError):
    """Why a text is not YAML as it may stand in a file of the kit; `line` counts from 1, where it is known."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice in one mapping, where YAML's readers silently take the last."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._checked: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # Called before keys are merged in (`<<`) for the first time; those may be overridden.
        if id(node) not in self._checked:
            self._checked.add(id(node))
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if (key.tag, key.value) in seen:
                        raise YamlError(f"the key {key.value!r} stands here twice", key.start_mark.line + 1)
                    seen.add((key.tag, key.value))
        super().flatten_mapping(node)


def parse(text: str) -> Any:
    """The plain value that the text is. Raises YamlError."""
    try:
        value = yaml.load(text, Loader=_Loader)
        values = _size(value, (), {}) if "*" in text else 0
    except YamlError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise YamlError(f"not valid YAML: {problem}", mark.line + 1 if mark else None) from None
    if values > _MOST_VALUES:
        raise YamlError(f"its aliases stand for more than {_MOST_VALUES} values")
    return value


def _size(value: object, above: tuple[int, ...], known: dict[int, int]) -> int:
    """Values there are when every alias is written out."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) in above:
        raise YamlError("an alias stands within its own anchor")
    if id(value) not in known:
        items = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(item, (*above, id(value)), known) for item in items)
    return known[id(value)]
