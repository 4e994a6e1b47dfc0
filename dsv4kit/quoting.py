"""The only place where a value becomes text for another language: a shell, an `#SBATCH` line, a Hydra override.

Each function takes any value of its domain and yields text that the other side reads back unchanged; the tests hold
that against the real readers with arbitrary strings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

shell = shlex.quote


def sbatch(value: str) -> str:
    """A value for an `#SBATCH --option=` line: double quotes, and `%` doubled because Slurm expands `%j` and its like.

    Raises ValueError for line breaks, which no such line can hold.
    """
    if "\n" in value or "\r" in value:
        raise ValueError(f"a line break cannot stand in an #SBATCH line: {value!r}")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def hydra(value: object) -> str:
    """The right-hand side of a Hydra override for a scalar, a sequence or a mapping of such.

    Strings always get single quotes. Two languages read them: Hydra's grammar, where `'` needs a backslash and the
    backslashes before a quote count double, and OmegaConf, where `${` begins an interpolation unless escaped.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return f"'{_hydra_string(value)}'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_hydra_key(key)}:{hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(hydra(item) for item in value) + "]"
    raise TypeError(f"no Hydra form for {type(value).__name__}: {value!r}")


def _hydra_string(value: str) -> str:
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # OmegaConf: `${` stays text behind an odd number of backslashes
    return re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), literal)


def _hydra_key(key: object) -> str:
    text = str(key)
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_\-]*", text):
        raise TypeError(f"no Hydra form for the mapping key {text!r}")
    return text
