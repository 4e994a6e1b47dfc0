"""What verl's composed configuration has, kept between starts: composing takes Hydra a second.

The cache only accepts: an override that gives a plain value to a known key is checked here. Everything else (an unknown
key, a table as a value, an interpolation) is left to Hydra, whose error message the user then sees.

Kept in `<cache>/verl-config/`, named by the hash of everything it was made from: verl's files, Hydra, this module. If
the cache cannot be read or written, Hydra composes as if there were none.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsv4kit.config.cache import cache_dir
from dsv4kit.config.tree import leaves
from dsv4kit.run.files import write_text

MISSING = "???"
# A key whose last part is as plain as this has no meaning of its own to Hydra (`a@b`, `~a`, a config group).
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+", re.ASCII)
_WHOLE_REFERENCE = re.compile(r"\$\{[^{}]*\}")
_REFERENCE = re.compile(r"[\w.]+")


class Composed(NamedTuple):
    """One composed tree: dotted keys of its values and of its tables, and which values are mandatory and not given.

    `embedded`: names that stand in interpolations within a longer text, where only a scalar can be put.
    `numbers`: values that are a number, or yes or no, where a text is a mistake.
    """

    values: frozenset[str]
    tables: frozenset[str]
    missing: frozenset[str]
    embedded: frozenset[str]
    numbers: frozenset[str]

    def accepts(self, pairs: Mapping[str, Any], is_added: Callable[[str], bool], optional: Collection[str]) -> bool:
        """Whether Hydra surely composes and resolves the tree with `pairs`; False where it has to be asked.

        `is_added` says whether a key may be new; `optional` keys may stay without a value.
        """
        if any(key not in pairs and key not in optional for key in self.missing):
            return False
        return all(self._takes(key, value, pairs, is_added(key)) for key, value in pairs.items())

    def _takes(self, key: str, value: object, pairs: Mapping[str, Any], added: bool) -> bool:
        if not _PLAIN_KEY.fullmatch(key) or not is_plain(value):
            return False
        if isinstance(value, list) and key.rpartition(".")[2] in self.embedded:
            return False
        if isinstance(value, str) and key in self.numbers:
            return False
        if key in self.values:
            return True
        if not added or key in self.tables:
            return False
        above = key.rpartition(".")[0]
        while above not in self.tables:
            if not above or above in self.values or above in pairs:
                return False
            above = above.rpartition(".")[0]
        return True


def is_plain(value: object) -> bool:
    """Whether Hydra reads the value as itself: no interpolation, no mark of a missing value."""
    if isinstance(value, list):
        return all(is_plain(item) and not isinstance(item, list) for item in value)
    if isinstance(value, str):
        return "$" not in value and MISSING not in value
    return value is None or isinstance(value, bool | int | float)


def of(tree: Mapping[str, Any], resolved: Mapping[str, Any]) -> Composed:
    """What is kept of a composed tree, as it is and with its interpolations resolved."""
    values: set[str] = set()
    tables: set[str] = set()
    embedded: set[str] = set()
    for key, value in leaves(tree):
        (tables if isinstance(value, Mapping) else values).add(key)
        parts = key.split(".")
        tables |= {".".join(parts[:length]) for length in range(1, len(parts))}
        if isinstance(value, str) and "${" in value and not _WHOLE_REFERENCE.fullmatch(value):
            embedded |= {name.rpartition(".")[2] for name in _REFERENCE.findall(value)}
    missing = {key for key, value in leaves(resolved) if value == MISSING}
    numbers = {key for key, value in leaves(tree) if isinstance(value, bool | int | float)}
    return Composed(*map(frozenset, (values, tables, missing, embedded, numbers)))


def path_of(config_dir: Path, config_name: str, choices: Collection[str]) -> Path:
    """Where the tree composed from these files with these group choices is kept."""
    key = hashlib.sha256(json.dumps([config_name, *choices]).encode())
    for path in [*sorted(config_dir.rglob("*.yaml")), *_makers()]:
        content = path.read_bytes()
        key.update(f"{path} {len(content)}\n".encode(errors="surrogateescape") + content)
    return cache_dir() / "verl-config" / f"{key.hexdigest()[:32]}.json"


def _makers() -> list[Path]:
    """Files that change when what composes does: the versions of Hydra and OmegaConf, and this module."""
    found = [Path(__file__)]
    for package, file in (("hydra", "__init__.py"), ("omegaconf", "version.py")):
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            found.append(Path(spec.origin).with_name(file))
    return found


def load(path: Path) -> Composed | None:
    """What is kept there; None where nothing that can be used is."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        lists = [content[name] for name in Composed._fields]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
        return None
    return Composed(*map(frozenset, lists))


def store(path: Path, composed: Composed) -> None:
    """Keeps it; where that does not work, nothing is kept."""
    with contextlib.suppress(OSError):
        write_text(path, json.dumps({name: sorted(names) for name, names in composed._asdict().items()}))
