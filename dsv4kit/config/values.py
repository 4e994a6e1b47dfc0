"""Reading the text of one override: `key=value`, as typed after `SET=` or `VERL=`."""

from __future__ import annotations

import re
from typing import Any

from dsv4kit.errors import UserError

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_\-./@]*\Z")
_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][-+]?[0-9]+)?\Z(?<=[0-9.])", re.ASCII)
_WORDS = {"true": True, "false": False, "null": None}


def split_words(text: str, variable: str) -> list[str]:
    """The overrides in one make variable: separated by spaces, with shell quotes around what holds spaces."""
    import shlex

    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(
            f"{variable}={text!r}: {str(error).lower()}; put quotes around a value that holds spaces"
        ) from None


def split_pair(text: str, variable: str) -> tuple[str, str]:
    """`key=value` as a pair of texts; everything after the first `=` is the value."""
    key, equals, value = text.partition("=")
    if not equals or not _KEY.match(key):
        raise UserError(f"{variable}: {text!r} is not of the form key=value")
    return key, value


def parse_value(text: str) -> Any:
    """A number, boolean, null, list or mapping where the text is plainly one, else the text itself, unchanged.

    Scalars are those of JSON: `017`, `yes`, `~`, dates and times stay text, also within a list. What has no JSON form
    (`inf`, a YAML tag, an alias to itself) is text as well.
    """
    stripped = text.strip()
    if stripped.lower() in _WORDS:
        return _WORDS[stripped.lower()]
    if _NUMBER.match(stripped) or (stripped[:1] + stripped[-1:]) in ("[]", "{}"):
        value = _read(stripped)
        if isinstance(value, int | float | list | dict):
            return value
    return text


def _read(text: str) -> Any:
    """The text as flow YAML with JSON's scalars; None where it is not YAML or has no JSON form."""
    import json

    import yaml

    class Loader(yaml.SafeLoader):
        """Without YAML 1.1's implicit types."""

        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML looks it up on the class

    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|false|True|False", re.ASCII), list("tfTF"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("null"), ["n"])
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)\Z"), list("-+0123456789"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
    try:
        value = yaml.load(text, Loader=Loader)
        json.dumps(value, allow_nan=False)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return None
    return value
