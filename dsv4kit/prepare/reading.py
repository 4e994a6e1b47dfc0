"""Records of a file, a local copy or the hub, one after the other; never all of them in memory."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsv4kit.errors import UserError
from dsv4kit.prepare.named import NamedSet

SUFFIXES = (".parquet", ".jsonl", ".json")
_ROWS_AT_A_TIME = 1000
_OTHER_SPLITS = ("test", "valid", "dev")


class SourceRow(NamedTuple):
    """One record and where it stands (`FILE line 7`)."""

    place: str
    values: Mapping[str, Any]


def of_file(path: Path) -> Iterator[SourceRow]:
    """Records of a file of JSON lines or of Parquet. Raises UserError for what is neither."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: its name ends with {suffix or 'nothing'!r}; read are {', '.join(SUFFIXES)}")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path}: is empty")
        yield from _parquet(path) if suffix == ".parquet" else _json(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def files_of_copy(copy: Path, config: str | None, split: str) -> list[Path]:
    """The files of a split in a local copy of a hub's repository, or of its original.

    A file's name begins with its split (`train-00000-of-00001.parquet`, `train.jsonl`); where a directory is called as
    the configuration, only what lies in it counts.
    """
    if copy.is_file():
        return [copy]
    if not copy.is_dir():
        raise UserError(f"FROM={copy}: no such file or directory")
    found = sorted(path for path in copy.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(copy).parts)]
    if config and (inside := [path for path in found if config in path.relative_to(copy).parts[:-1]]):
        found = inside
    named = [path for path in found if path.name.lower().startswith(split)]
    if not named and split == "train" and len(found) == 1 and not found[0].name.lower().startswith(_OTHER_SPLITS):
        named = found  # a set without splits is one file, called as it likes
    if not named:
        seen = ", ".join(str(path.relative_to(copy)) for path in found[:5]) or "none"
        raise UserError(f"FROM={copy}: no file of the split {split!r}; files with data: {seen}")
    return named


def of_hub(source: NamedSet, split: str) -> Iterator[SourceRow]:
    """Records from the hub. Raises UserError where it cannot be reached, or does not give them away."""
    import datasets

    # The network fails in as many ways as it has layers; what the user can do about it is the same.
    try:
        stream = datasets.load_dataset(source.repository, source.config, split=split, streaming=True)
        for number, values in enumerate(stream, 1):
            yield SourceRow(f"{source.repository} {split} row {number}", values)
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{source.repository}: the hub does not give it: {why}; FROM=DIRECTORY takes a local copy"
        ) from None


def _json(path: Path) -> Iterator[SourceRow]:
    """One JSON object a line; or a single array of objects, which has to fit into memory."""
    with path.open(encoding="utf-8") as file:
        try:
            start = next((line for line in file if line.strip()), "")
            file.seek(0)
            if start.lstrip().startswith("["):
                yield from _array(path, file.read())
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield SourceRow(f"{path} line {number}", _object(line, f"{path} line {number}"))
        except UnicodeDecodeError:
            raise UserError(f"{path}: is not UTF-8 text") from None


def _array(path: Path, content: str) -> Iterator[SourceRow]:
    try:
        items = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"{path}: begins like a JSON array and is none") from None
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise UserError(f"{path} item {number}: not a JSON object")
        yield SourceRow(f"{path} item {number}", item)


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{place}: no JSON") from None
    if not isinstance(value, dict):
        raise UserError(f"{place}: not a JSON object")
    return value


def _parquet(path: Path) -> Iterator[SourceRow]:
    import datasets
    import pyarrow

    # Not in the user's cache: the stream reads the file where it is.
    datasets.disable_progress_bars()
    try:
        stream = datasets.load_dataset(
            "parquet", data_files=[os.fspath(path)], split="train", streaming=True, batch_size=_ROWS_AT_A_TIME
        )
        for number, values in enumerate(stream, 1):
            yield SourceRow(f"{path} row {number}", values)
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be read as Parquet: {why}") from None


def peeked(records: Iterator[SourceRow], what: str) -> tuple[SourceRow, Iterator[SourceRow]]:
    """The first record, and all of them. Raises UserError where there is none."""
    first = next(records, None)
    if first is None:
        raise UserError(f"{what}: has no rows")
    return first, itertools.chain([first], records)
