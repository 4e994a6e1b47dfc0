"""The header of a safetensors file, with the standard library.

The format: eight bytes with the length of a JSON header (little endian), the header with each tensor's type, shape and
place in what follows, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

METADATA = "__metadata__"
LENGTH = struct.Struct("<Q")
# The reference implementation refuses longer headers.
LONGEST_BYTES = 100_000_000


class CutShortError(ValueError):
    """The file ends before its header does, or is not in this format."""


class Header(NamedTuple):
    """`entries`: name -> what the header says of a tensor (and `METADATA`); the tensors begin at byte `base`."""

    entries: dict[str, Any]
    base: int
    file_bytes: int


def read(path: Path) -> Header:
    """The header of the file. Raises CutShortError, ValueError for one that is damaged, and OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(LENGTH.size)
        (length,) = LENGTH.unpack(start) if len(start) == LENGTH.size else (0,)
        if not 2 <= length <= min(LONGEST_BYTES, size - LENGTH.size):
            raise CutShortError(f"{size} bytes")
        try:
            entries = json.loads(file.read(length))
        except RecursionError:
            raise ValueError("nested too deeply") from None
    if not isinstance(entries, dict):
        raise ValueError("not a JSON object")
    return Header(entries, LENGTH.size + length, size)
