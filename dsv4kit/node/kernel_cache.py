"""Compiled kernels in a node's scratch: what earlier segments compiled is put there before anything starts.

The stack compiles at its first steps, which takes 1,025 s (GB200) to 1,897 s (H100) with nothing there. The place is
the same in every segment of a run, because some compilers write their own path into what they build, and it stays
between the attempts of a job. A cache never ends an attempt: what fails is told, and the kernels are compiled again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from dsv4kit.node.scratch import Scratch
from dsv4kit.run import kernels
from dsv4kit.run.directory import RunDir
from dsv4kit.run.node_spec import KernelCaches, NodeSpec


class KernelCache:
    """This node's, for as long as its job lives. `known`: the files that are kept already, with sizes in bytes."""

    def __init__(self, asked: KernelCaches, shared: Path, scratch: Scratch) -> None:
        self.known: dict[str, int] = {}
        self._asked, self._shared, self._scratch = asked, shared, scratch
        self._restored = False

    @classmethod
    def claim(cls, spec: NodeSpec) -> tuple[KernelCache | None, list[str]]:
        """Takes the place in scratch; None where no kernels are kept, with the reason where they should be."""
        if spec.kernels is None:
            return None, []
        run = RunDir(Path(spec.run_dir))
        scratch = Scratch(Path(spec.scratch_dir) / f"kernels-{run.digest}")
        try:
            if unfit := _unfit(Path(spec.scratch_dir), spec.kernels.limit_bytes):
                return None, [f"compiled kernels are not kept: {unfit}"]
            scratch.claim_empty()
        except OSError as error:
            return None, [f"compiled kernels are not kept: {error}"]
        return cls(spec.kernels, run.kernels(spec.kernels.key), scratch), []

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The variables by which the stack finds its caches; not those that `base` has or that the image has filled."""
        home = Path(base.get("HOME", "/"))
        return {
            name: str(self._scratch.path / directory)
            for name, directory in self._asked.variables.items()
            if name not in base and not (name in self._asked.filled and _has_files(home / self._asked.filled[name]))
        }

    @property
    def room_bytes(self) -> int:
        """What may still be added to what is kept."""
        return self._asked.limit_bytes - sum(self.known.values())

    def restore(self) -> list[str]:
        """Puts what is kept in place, once per job; readable lines of what was done and what is broken."""
        if self._restored:
            return []
        self._restored, since, lines = True, time.monotonic(), []
        for bundle in kernels.bundles(self._shared):
            try:
                self.known.update(kernels.unpack(bundle, self._scratch.path))
            except kernels.BrokenBundleError as error:
                lines.append(f"{bundle}: not used, its kernels are compiled again: {error}")
        if self.known:
            lines.append(f"{_counted(self.known)} compiled before, there after {time.monotonic() - since:.1f} s")
        return lines

    def new(self) -> dict[str, int]:
        """What has been compiled here and is not kept yet: names and sizes in bytes."""
        found = kernels.compiled(self._scratch.path)
        return {name: size for name, size in found.items() if name not in self.known}

    def keep(self, files: Mapping[str, int], bundle: str) -> int:
        """Writes these into a bundle of that name for the next segments; how many still had their size (bytes).

        Raises OSError.
        """
        return kernels.pack(self._scratch.path, files, self._shared / bundle) if files else 0

    def remove(self) -> None:
        """The job is over."""
        self._scratch.remove()


def _unfit(scratch: Path, limit_bytes: int) -> str | None:
    """Why kernels cannot be used from there; None where they can."""
    found = os.statvfs(scratch)
    if found.f_flag & os.ST_NOEXEC:
        return f"{scratch} is mounted noexec, and kernels are libraries"
    free = found.f_bavail * found.f_frsize
    if free < limit_bytes:
        return f"{scratch} has {free / 2**30:.1f} GiB free, fewer than kernel_cache.limit_gib ({limit_bytes / 2**30:g})"
    return None


def _has_files(directory: Path) -> bool:
    try:
        return any(directory.iterdir())
    except OSError:
        return False


def _counted(files: Mapping[str, int]) -> str:
    return f"{len(files)} files of kernels ({sum(files.values()) / 1e6:.1f} MB)"
