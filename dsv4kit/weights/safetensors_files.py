"""Safetensors files without torch: what is in one, and the copy of a part of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dsv4kit.checkpoint import safetensors_header
from dsv4kit.checkpoint.safetensors_header import LENGTH, METADATA
from dsv4kit.errors import UserError

_CHUNK = 16 * 2**20


class Tensor(NamedTuple):
    """A tensor in a file; `begin` and `end` count from the file's start."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


class Shard(NamedTuple):
    """One file: its tensors in the order of their bytes, and the free metadata of its header."""

    path: Path
    tensors: list[Tensor]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Shard:
    """What is in the file. Raises UserError for one that is damaged, cut short or not there."""
    try:
        header, base, size = safetensors_header.read(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except safetensors_header.CutShortError as error:
        raise UserError(f"{path}: not a safetensors file, or cut short at {error}") from None
    except ValueError:
        raise UserError(f"{path}: its safetensors header is damaged") from None
    try:
        metadata = dict(header.pop(METADATA, {}))
        tensors = [_tensor(name, entry, base) for name, entry in header.items()]
    except (AttributeError, TypeError, KeyError, ValueError, OverflowError):
        raise UserError(f"{path}: its safetensors header is damaged") from None
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    if tensors and tensors[-1].end > size:
        raise UserError(f"{path}: cut short: {size} bytes of {tensors[-1].end}; download it again")
    return Shard(path, tensors, metadata)


def _tensor(name: str, entry: Mapping[str, Any], base: int) -> Tensor:
    begin, end = entry["data_offsets"]
    shape = list(entry["shape"])
    if not all(type(number) is int for number in (begin, end, *shape)) or not 0 <= begin <= end:
        raise ValueError
    return Tensor(name, str(entry["dtype"]), shape, base + begin, base + end)


def copy_tensors(shard: Shard, wanted: Sequence[Tensor], destination: Path, name_of: Callable[[str], str]) -> None:
    """Writes a file with the `wanted` tensors of `shard` under new names; no more than a chunk is held in memory."""
    header: dict[str, Any] = {METADATA: dict(shard.metadata)} if shard.metadata else {}
    place = 0
    for tensor in wanted:
        header[name_of(tensor.name)] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [place, place + tensor.size],
        }
        place += tensor.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned, as the reference implementation has them
    with shard.path.open("rb") as source, destination.open("xb") as target:
        target.write(LENGTH.pack(len(text)) + text)
        for tensor in wanted:
            source.seek(tensor.begin)
            _copy(source, target, tensor.size)
        target.flush()
        os.fsync(target.fileno())


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size:
        chunk = source.read(min(size, _CHUNK))
        if not chunk:
            raise UserError(f"{source.name}: shorter than when it was looked at")
        target.write(chunk)
        size -= len(chunk)
