"""What can be told about one file or one directory tree of a checkpoint, cheaply and with the standard library.

Every check here looks at names, sizes and the last (or first) few bytes of a file; none reads tensors. They find what a
killed process, a full disk or a lost node leaves behind: files that are missing, empty, cut short, or padded with
zeros. A flipped byte in the middle of a tensor is not found.

Standard library only; used on the compute nodes.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import re
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dsv4kit.checkpoint import safetensors_header
from dsv4kit.run.files import sync_directory

FileSizes = dict[str, int]
"""Path below a directory, with `/` -> bytes."""

SHARD_SUFFIXES = (".pt", ".distcp", ".safetensors", ".bin")

_END_BYTES = 64
# Each look waits for the file system; a checkpoint of 512 ranks has some 1,500 files.
_LOOKS_AT_ONCE = 16

LARGEST_INDEX_BYTES = 64 * 1024 * 1024
"""A dist_ckpt index beyond this is searched for file names only: unpickling it would take longer than it is worth."""


def show(name: str) -> str:
    """`name` as it can be printed on one line: hostile or undecodable names are escaped."""
    return name if name.isprintable() else ascii(name)[1:-1]


def walk_sizes(root: Path) -> FileSizes:
    """Size of every file below `root`, in one `os.scandir` walk (one `stat` a file).

    Symbolic links are followed (a user may have moved a tree to another file system), each linked directory once. What
    vanishes during the walk, and dangling links, are left out. Raises OSError where a directory cannot be read.
    """
    sizes: FileSizes = {}
    linked: set[tuple[int, int]] = set()
    pending = [(os.fspath(root), "")]
    while pending:
        path, prefix = pending.pop()
        try:
            entries = os.scandir(path)
        except FileNotFoundError:
            continue
        with entries:
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append((entry.path, f"{prefix}{entry.name}/"))
                        continue
                    status = entry.stat()
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.ELOOP):
                        continue
                    raise
                if not entry.is_dir():
                    sizes[prefix + entry.name] = status.st_size
                elif (status.st_dev, status.st_ino) not in linked:
                    linked.add((status.st_dev, status.st_ino))
                    pending.append((entry.path, f"{prefix}{entry.name}/"))
    return sizes


def torch_file_problem(path: Path, size: int) -> str | None:
    """Why `path` cannot be a whole file of `torch.save`, or None.

    `torch.save` writes a zip archive without a comment: 22 bytes of end-of-central-directory record close the file, and
    the directory it points to lies directly before it (with or without the 76 bytes of the 64-bit records, which
    PyTorch writes always). `zipfile.is_zipfile` is laxer: it accepts a record found anywhere in the last 64 KiB.
    """
    if size == 0:
        return "is empty"
    if size < 22:
        return f"is cut short ({size} bytes)"
    tail_bytes = min(size, 98)
    with open(path, "rb") as file:
        first = file.read(4)
        file.seek(size - tail_bytes)
        tail = file.read(tail_bytes)
    if first != b"PK\x03\x04":
        return "is not a file of torch.save (no zip header)"
    if len(tail) != tail_bytes or tail[-22:-18] != b"PK\x05\x06" or tail[-2:] != b"\0\0":
        return f"is cut short or damaged (no zip end record in its last bytes; {size} bytes)"
    directory_bytes, directory_at = struct.unpack("<II", tail[-10:-2])
    if directory_bytes != 0xFFFFFFFF and directory_at != 0xFFFFFFFF:
        whole = directory_at + directory_bytes in (size - 22, size - 22 - 76)
    else:  # archives over 4 GiB: the 64-bit locator (20 bytes) and record (56 bytes) precede the end record
        whole = tail[-42:-38] == b"PK\x06\x07" and struct.unpack("<Q", tail[-34:-26])[0] == size - 98
        whole = whole and tail[:4] == b"PK\x06\x06" and sum(struct.unpack("<QQ", tail[40:56])) == size - 98
    return None if whole else f"is cut short or damaged (its zip directory is not where it should be; {size} bytes)"


def safetensors_problem(path: Path, size: int) -> str | None:
    """Why `path` cannot be a whole safetensors file, or None: its header states where the last tensor ends."""
    if size == 0:
        return "is empty"
    try:
        entries, base, _ = safetensors_header.read(path)
        places = [entry["data_offsets"] for name, entry in entries.items() if name != safetensors_header.METADATA]
        whole = base + max((int(place[1]) for place in places), default=0)
    except safetensors_header.CutShortError:
        return f"is cut short ({size} bytes)"
    except (ValueError, TypeError, KeyError, IndexError):
        return "has a damaged safetensors header"
    return None if whole == size else f"has {size} bytes, its header says {whole}"


def blank_end_problem(path: Path, size: int) -> str | None:
    """Why a shard of any format cannot be whole: its first or its last 64 bytes are zeros, or None.

    So a file looks whose size was written and whose content never was (a node that lost power, a file system that ran
    full). Each piece of a `.distcp` is a zip archive or a pickle: neither begins or ends with so many zeros.
    """
    if size == 0:
        return "is empty"
    with open(path, "rb") as file:
        first = file.read(_END_BYTES)
        file.seek(max(0, size - _END_BYTES))
        last = file.read(_END_BYTES)
    blank = [where for where, end in (("begins", first), ("ends", last)) if not end.strip(b"\0")]
    return f"{' and '.join(blank)} with zeros: its content never reached the disk ({size} bytes)" if blank else None


def ends_problems(root: Path, names: Iterable[str], files: FileSizes) -> list[str]:
    """What the first and last bytes of the shards among `names` show; other files are passed over.

    A safetensors file may well end with zeros, and its header says where it ends.
    """

    def look(name: str) -> str | None:
        path, size = root / name, files[name]
        try:
            if name.endswith(".pt"):
                problem = torch_file_problem(path, size)
            elif name.endswith(".safetensors"):
                problem = safetensors_problem(path, size)
            else:
                problem = blank_end_problem(path, size)
        except FileNotFoundError:
            problem = "is missing"
        return f"{show(name)} {problem}" if problem else None

    shards = [name for name in names if name.endswith(SHARD_SUFFIXES) and name in files]
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
        return [problem for problem in pool.map(look, shards) if problem]


def sync_tree(root: Path) -> None:
    """Everything below `root` that this machine has written is on disk when this returns, names included.

    What other machines have written, their file systems' clients have to send: NFS does at close, Lustre when the file
    is read from elsewhere, as the looks above do. Raises OSError.
    """
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            try:
                descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(directory))


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None where the file is missing, cut short or something else."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class _Inert:
    """Stands in for every class named in a pickle, so that reading an index never runs code from it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        pass

    def extend(self, values: object) -> None:
        pass


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert


def shards_of_index(index: bytes) -> FileSizes | None:
    """Files that a DCP index (`.metadata`) names -> the least bytes each must have; None if unreadable.

    The index is a pickle: `Metadata.storage_data` maps each piece to `_StorageInfo(relative_path, offset, length)`
    (torch/distributed/checkpoint/filesystem.py). It is unpickled with inert stand-ins for all classes. Where that fails
    or the index is huge, the names are found by their form (`__<rank>_<n>.distcp`), each with a least size of 1.
    """
    if not index.endswith(b"."):  # the STOP opcode: a pickle cut short has none
        return None
    if len(index) <= LARGEST_INDEX_BYTES:
        try:
            root = _InertUnpickler(io.BytesIO(index)).load()
            needed: FileSizes = {}
            for info in root.state["storage_data"].values():
                name, end = str(info.state["relative_path"]), int(info.state["offset"]) + int(info.state["length"])
                needed[name] = max(needed.get(name, 1), end)
            return needed
        except Exception:  # any pickle may raise anything; the search below is the second way
            pass
    return {match.decode(): 1 for match in re.findall(rb"__\d+_\d+\.distcp", index)}


def dist_ckpt_problems(root: Path, tree: str, files: FileSizes) -> list[str]:
    """Problems of one Megatron `dist_ckpt` tree, `root/tree` (`tree` ends with `/`, `files` is `walk_sizes(root)`).

    Written in this order (megatron-core `dist_checkpointing/serialization.py`): the `.distcp` shards, `.metadata` (the
    index), `metadata.json` last. `common.pt` exists only up to megatron-core 0.18; later ones keep the common state in
    the shards under the key `common_state`, so it is asked for only where the index does not name that key.
    """
    problems = []
    if tree + "metadata.json" not in files:
        problems.append(f"{show(tree)}metadata.json is missing (written last: this tree was not finished)")
    elif "sharded_backend" not in (read_json_object(root / tree / "metadata.json") or {}):
        problems.append(f"{show(tree)}metadata.json is unreadable or cut short")
    if tree + ".metadata" not in files:
        problems.append(f"{show(tree)}.metadata is missing (the index of the shards)")
        return problems
    try:
        index = (root / tree / ".metadata").read_bytes()
    except FileNotFoundError:
        index = b""
    needed = shards_of_index(index)
    if needed is None:
        problems.append(f"{show(tree)}.metadata is unreadable or cut short")
        return problems
    for name, least in sorted(needed.items()):
        size = files.get(tree + name)
        if size is None:
            problems.append(f"{show(tree + name)} is missing (named in the index)")
        elif size < least:
            problems.append(f"{show(tree + name)} has {size} bytes, the index needs {least}")
    if not problems:
        problems += ends_problems(root, [tree + name for name in sorted(needed)], files)
    if tree + "common.pt" in files:
        problems += file_problems(root, [tree + "common.pt"], files)
    elif b"common_state" not in index:
        problems.append(f"{show(tree)}common.pt is missing")
    return problems


def huggingface_problems(root: Path, tree: str, files: FileSizes) -> list[str]:
    """Problems of the weights in a Hugging Face directory at `root/tree` (`tree` ends with `/`).

    Every file that `*.index.json` names must be there; without one, every part of a `...-00001-of-00005...` series.
    """
    names = [name[len(tree) :] for name in files if name.startswith(tree) and "/" not in name[len(tree) :]]
    weights = {name for name in names if name.endswith((".safetensors", ".bin"))}
    for index in sorted(name for name in names if name.endswith((".safetensors.index.json", ".bin.index.json"))):
        weight_map = (read_json_object(root / tree / index) or {}).get("weight_map")
        if not isinstance(weight_map, dict):
            return [f"{show(tree + index)} is unreadable or cut short"]
        weights |= {str(name) for name in weight_map.values()}
    for name in list(weights):
        series = re.fullmatch(r"(.*-)(\d+)-of-(\d+)(\..*)", name, re.DOTALL)
        if series and 0 < int(series[3]) <= 100_000:
            width = len(series[2])
            weights |= {f"{series[1]}{k:0{width}d}-of-{series[3]}{series[4]}" for k in range(1, int(series[3]) + 1)}
    if not weights:
        return [f"{show(tree)} holds no weights (*.safetensors or *.bin)"]
    return file_problems(root, [tree + name for name in sorted(weights)], files)


def file_problems(root: Path, names: list[str], files: FileSizes) -> list[str]:
    """Problems of single files below `root`: missing, empty, or (torch and safetensors files) cut short."""
    problems = []
    for name in names:
        size = files.get(name)
        problem = None
        try:
            if size is None:
                problem = "is missing"
            elif name.endswith(".pt"):
                problem = torch_file_problem(root / name, size)
            elif name.endswith(".safetensors"):
                problem = safetensors_problem(root / name, size)
            elif size == 0:
                problem = "is empty"
        except FileNotFoundError:
            problem = "is missing"
        if problem:
            problems.append(f"{show(name)} {problem}")
    return problems
