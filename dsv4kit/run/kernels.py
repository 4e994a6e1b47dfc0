"""Kernels that a run has compiled, kept on the shared file system for its next segments.

    <run>/kernels/<key>/0001-0-node17.tar.gz    what that node compiled first in that attempt; never changed
    <run>/kernels/<key>/0000-0003.tar.gz        what another run had when this one was submitted
    <attempt>/kernels/asked.json                node 0 asks all nodes for the names of what they have compiled
    <attempt>/kernels/node17.names              which that is: `{name: size in bytes}`
    <attempt>/kernels/shares.json               which of it each node is to keep: `{host: [name, ...]}`

gzip, because Python has it everywhere: an image need not have zstd, and a bundle is read by nodes of another image.

Standard library only; frozen into every run.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dsv4kit.run.directory import AttemptDir
from dsv4kit.run.files import read_json, read_object, replacement, write_json

_SUFFIX, _NAMES = ".tar.gz", ".names"
# Half-written or of a moment: locks, and what is written under another name first.
_PASSING = (".lock", ".tmp", ".part", ".pid")
_BLOCK = 2**20


class BrokenBundleError(Exception):
    """A bundle that is not what some node wrote, or that others than this user could have written."""


def brought(directory: Path, number: int) -> Path:
    """Where a bundle of another run goes: under a name that no node of this one gives."""
    return directory / f"0000-{number:04d}{_SUFFIX}"


def bundles(directory: Path) -> list[Path]:
    """All of a key, oldest first."""
    return sorted(directory.glob(f"*{_SUFFIX}"))


@dataclass(frozen=True)
class KernelFiles:
    """The files through which the nodes of an attempt agree, as seen by one of them."""

    attempt: AttemptDir
    host: str

    def ask(self) -> None:
        """Node 0 asks all nodes for names."""
        write_json(self._directory / "asked.json", {})

    def asked(self) -> bool:
        """Whether it has."""
        return read_json(self._directory / "asked.json") is not None

    def name(self, files: Mapping[str, int]) -> None:
        """This node tells what it has compiled."""
        write_json(self._directory / f"{self.host}{_NAMES}", files)

    def names(self) -> dict[str, dict[str, int]]:
        """What the nodes have told so far, by host."""
        return {path.name.removesuffix(_NAMES): read_object(path) for path in self._directory.glob(f"*{_NAMES}")}

    def share_out(self, by_host: Mapping[str, list[str]]) -> None:
        """Node 0 tells who keeps what."""
        write_json(self._directory / "shares.json", by_host)

    def share(self) -> list[str] | None:
        """What this node is to keep; None while node 0 has not told."""
        shares = read_json(self._directory / "shares.json")
        return list(shares.get(self.host, [])) if isinstance(shares, dict) else None

    @property
    def bundle_name(self) -> str:
        """The file name of what this node keeps."""
        return f"{self.attempt.segment.number:04d}-{self.attempt.number}-{self.host}{_SUFFIX}"

    @property
    def _directory(self) -> Path:
        return self.attempt.path / "kernels"


def compiled(root: Path) -> dict[str, int]:
    """The files below `root` by their names relative to it, with their sizes in bytes; nothing that passes."""
    found: dict[str, int] = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and not _passes(name):
                    found[path.relative_to(root).as_posix()] = status.st_size
    return found


def _passes(name: str) -> bool:
    return name.startswith((".", "tmp")) or name.endswith(_PASSING)


@dataclass(frozen=True)
class Sharing:
    """Who keeps what. `files`: all of it, with sizes in bytes; `without_room`: how many are over the limit."""

    by_host: dict[str, list[str]]
    files: dict[str, int]
    without_room: int

    @property
    def line(self) -> str:
        """For whoever looks at the run."""
        size = f"{len(self.files)} files of kernels ({sum(self.files.values()) / 1e6:.1f} MB)"
        over = f"; {self.without_room} more are over kernel_cache.limit_gib" if self.without_room else ""
        return f"{size} compiled in these steps, kept for the next segments{over}"


def shared_out(names: Mapping[str, Mapping[str, int]], known: Iterable[str], room_bytes: int) -> Sharing:
    """Each file once, by the first host that has it and as far as there is room.

    `names`: what each host has compiled, with sizes in bytes. `known`: what is kept already.
    """
    seen, by_host, files, without_room = set(known), dict[str, list[str]](), dict[str, int](), 0
    for host in sorted(names):
        for name, size in sorted(names[host].items()):
            if name in seen:
                continue
            seen.add(name)
            if size > room_bytes:
                without_room += 1
                continue
            room_bytes -= size
            files[name] = size
            by_host.setdefault(host, []).append(name)
    return Sharing(by_host, files, without_room)


def pack(root: Path, files: Mapping[str, int], bundle: Path) -> int:
    """Writes a bundle of these files (name, size in bytes); how many went in: not one that is gone or has grown."""
    count = 0
    bundle.parent.mkdir(parents=True, exist_ok=True)
    with replacement(bundle) as partial, tarfile.open(partial, "w:gz", compresslevel=1) as archive:
        for name, size in files.items():
            with contextlib.suppress(FileNotFoundError):
                if (root / name).lstat().st_size == size:
                    archive.add(root / name, arcname=name, recursive=False)
                    count += 1
    return count


def unpack(bundle: Path, root: Path) -> dict[str, int]:
    """Writes what is in the bundle below `root`, times included (ninja compares them); names and sizes in bytes.

    Raises BrokenBundleError before anything is written.
    """
    with _reading(bundle):
        status = bundle.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BrokenBundleError("others than its user could have written it")  # Inductor's caches are pickles
        with gzip.open(bundle) as whole:
            while whole.read(_BLOCK):  # up to its checksum
                pass
        return dict(_extracted(bundle, root))


def _extracted(bundle: Path, root: Path) -> Iterator[tuple[str, int]]:
    with tarfile.open(bundle, "r:gz") as archive:
        for member in archive:
            inside = PurePosixPath(member.name)
            if not member.isreg() or inside.is_absolute() or ".." in inside.parts:
                raise BrokenBundleError(f"{member.name!r} is not a file below the caches")
            path = root / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None  # of a regular file
            path.write_bytes(content.read())
            path.chmod(member.mode & 0o700)
            os.utime(path, (member.mtime, member.mtime))
            yield member.name, member.size


@contextlib.contextmanager
def _reading(bundle: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        raise BrokenBundleError(f"{type(error).__name__}: {error}") from None
