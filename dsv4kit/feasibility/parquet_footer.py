"""The footer of a Parquet file in plain Python: columns, their types, row count, and what the writer noted of values.

pyarrow alone is larger than the whole control plane may be, and the footer answers what has to be known before a run is
submitted: it holds the schema, and per column the least and greatest value and the number of nulls over all rows. The
rows themselves (compressed pages) are not read. Format: apache/parquet-format, `parquet.thrift`, in Thrift's compact
protocol.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAGIC = b"PAR1"
_MAX_DEPTH = 32
_TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")


class ParquetError(Exception):
    """Not a Parquet file, or one this reader does not understand."""


@dataclass(frozen=True)
class Column:
    """One leaf column. `low`, `high` and `nulls` are None where the writer noted nothing."""

    type: str
    low: bytes | None = None
    high: bytes | None = None
    nulls: int | None = None


@dataclass(frozen=True)
class Footer:
    """What the footer says; leaf columns by their dotted path without the steps that only spell out a list."""

    rows: int
    columns: dict[str, Column] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Top-level columns."""
        return list(dict.fromkeys(path.partition(".")[0] for path in self.columns))


# What a damaged footer can make of the steps below.
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    StopIteration,
    TypeError,
    ValueError,
    struct.error,
)


def read(path: str | Path) -> Footer:
    """The footer of a file. Raises ParquetError, or OSError where it cannot be read."""
    return parse(_footer_bytes(Path(path)))


def parse(data: bytes) -> Footer:
    """The footer from its own bytes. Raises ParquetError."""
    try:
        return _footer(_Compact(data).struct())
    except _DAMAGE as error:
        raise ParquetError(f"its footer is not understood ({type(error).__name__})") from None


def _footer_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < 12:
            raise ParquetError("not a Parquet file: too short")
        file.seek(size - 8)
        length, magic = struct.unpack("<I4s", file.read(8))
        file.seek(0)
        if magic == b"PARE":
            raise ParquetError("its footer is encrypted")
        if magic != _MAGIC or file.read(4) != _MAGIC or not 0 < length <= size - 12:
            raise ParquetError("not a Parquet file, or one that was not written to its end")
        file.seek(size - 8 - length)
        return file.read(length)


class _Compact:
    """Thrift's compact protocol: any struct as field id -> value."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """One struct."""
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while header := self._byte():
            delta, kind = header >> 4, header & 15
            number = number + delta if delta else self._zigzag()
            fields[number] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 7:
            return self._bytes(8)
        if kind == 8:
            return self._bytes(self._varint())
        if kind in (9, 10):
            return list(self._list(depth))
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"field type {kind}")

    def _list(self, depth: int) -> Iterator[Any]:
        header = self._byte()
        count, kind = header >> 4, header & 15
        for _ in range(self._varint() if count == 15 else count):
            # In a list a boolean has a byte of its own; in a struct its value is its type.
            yield self._byte() == 1 if kind in (1, 2) else self._value(kind, depth + 1)

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise ValueError("length beyond the end")
        self._at += count
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 70:
                raise ValueError("number too long")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)


def _footer(metadata: dict[int, Any]) -> Footer:
    """FileMetaData: 2 schema, 3 num_rows, 4 row_groups."""
    elements = iter(metadata[2])
    root = next(elements)
    leaves: dict[tuple[str, ...], tuple[str, str]] = {}
    for _ in range(root.get(5, 0)):
        leaves |= _leaves(elements, (), "")
    noted = _statistics(metadata.get(4, []))
    columns = {}
    for path, (shown, kind) in leaves.items():
        columns[shown] = Column(kind, *noted.get(path, (None, None, None)))
    return Footer(metadata[3], columns)


def _leaves(
    elements: Iterator[dict[int, Any]], above: tuple[str, ...], shown: str, depth: int = 0
) -> dict[tuple[str, ...], tuple[str, str]]:
    """SchemaElement: 1 type, 4 name, 5 num_children, 6 converted type (3: LIST); a list's inner steps have no name."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    element = next(elements)
    name = element[4].decode()
    path = (*above, name)
    shown = f"{shown}.{name}".lstrip(".")
    children = element.get(5, 0)
    if not children:
        return {path: (shown, _TYPES[element[1]])}
    found: dict[tuple[str, ...], tuple[str, str]] = {}
    if element.get(6) == 3:
        repeated = next(elements)
        inner = (*path, repeated[4].decode())
        if not repeated.get(5, 0):
            return {inner: (shown, _TYPES[repeated[1]])}
        for _ in range(repeated[5]):
            item = _leaves(elements, inner, "", depth + 1)
            # The step called `element` or `item` stands for each entry; only what lies below it has a name.
            found |= {
                full: (f"{shown}.{tail}".rstrip("."), kind)
                for full, (tail, kind) in ((f, (s.partition(".")[2], k)) for f, (s, k) in item.items())
            }
        return found
    for _ in range(children):
        found |= _leaves(elements, path, shown, depth + 1)
    return found


def _statistics(groups: list[dict[int, Any]]) -> dict[tuple[str, ...], tuple[bytes | None, bytes | None, int | None]]:
    """Over all row groups. ColumnChunk: 3 metadata; ColumnMetaData: 3 path, 12 statistics (3 nulls, 5 max, 6 min)."""
    noted: dict[tuple[str, ...], list[dict[int, Any]]] = {}
    for group in groups:
        for chunk in group[1]:
            metadata = chunk.get(3, {})
            noted.setdefault(tuple(part.decode() for part in metadata.get(3, [])), []).append(metadata.get(12, {}))
    merged = {}
    for path, all_groups in noted.items():
        lows, highs = [s.get(6) for s in all_groups], [s.get(5) for s in all_groups]
        nulls = [s.get(3) for s in all_groups]
        merged[path] = (
            None if None in lows else min(low for low in lows if low is not None),
            None if None in highs else max(high for high in highs if high is not None),
            None if None in nulls else sum(count for count in nulls if count is not None),
        )
    return merged
