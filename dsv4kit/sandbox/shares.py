"""Directories of the host that every node sees at the same path, although its /tmp, /run and /dev/shm are its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dsv4kit import hints
from dsv4kit.errors import UserError
from dsv4kit.run.files import write_text
from dsv4kit.sandbox.host import mount_points, must
from dsv4kit.sandbox.node import NAMESPACES, Node, same_directory, view
from dsv4kit.sandbox.spec import SandboxPaths

PRIVATE = (Path("/tmp"), Path("/run"), Path("/dev/shm"))


def is_private(path: Path) -> bool:
    """True for a path below a directory that each node has for itself."""
    return any(base in path.parents for base in PRIVATE)


def pairs_for(path: Path) -> list[tuple[str, str]]:
    """(directory on the host, path in the node) to bind so that `path` is seen, also through a symbolic link."""
    literal = Path(os.path.abspath(path))
    if not literal.is_dir():
        raise UserError(f"cannot share {literal}: not a directory")
    source = literal.resolve()
    for candidate in (literal, source):
        if candidate in PRIVATE:
            raise UserError(f"cannot share {candidate} itself, each node has its own: share a directory below it")
    return [(str(source), str(target)) for target in dict.fromkeys((source, literal)) if is_private(target)]


def recorded(layout: SandboxPaths) -> list[tuple[str, str]]:
    """The pairs that `node_init.sh` binds when a node is switched on."""
    fields = layout.shares.read_text().split("\0")[:-1] if layout.shares.exists() else []
    return list(zip(fields[::2], fields[1::2], strict=True))


def record(layout: SandboxPaths, paths: Iterable[Path]) -> None:
    """Add the paths to the record; checked first, so that one wrong path changes nothing."""
    known = dict.fromkeys(recorded(layout))
    wanted = {**known, **dict.fromkeys(pair for path in paths for pair in pairs_for(path))}
    if wanted != known or not layout.shares.exists():
        write_text(layout.shares, "".join(f"{source}\0{target}\0" for source, target in wanted))


def show(node: Node, paths: Iterable[Path]) -> None:
    """Make the paths visible on a running node now. A directory made anew since it was shared is bound anew."""
    init = node.init()
    if init is None:
        return
    for path in paths:
        for source, target in pairs_for(path):
            if same_directory(Path(source), view(init, target)):
                continue
            inside = ["nsenter", "--target", str(init.pid), *NAMESPACES, "--"]
            if target in mount_points(init.pid):
                must([*inside, "umount", "--lazy", "--", target])
            must([*inside, "mkdir", "-p", "--", target])
            host_source = f"/run/host{source}" if is_private(Path(source)) else source
            must([*inside, "mount", "--no-canonicalize", "--rbind", "--", host_source, target])
        if not same_directory(path, view(init, os.path.abspath(path))):
            raise UserError(
                f"{path} is not the same directory on {node.name}: it was mounted after the sandbox came up"
                f" (`{hints.command('sandbox down', NAME=node.layout.name)}`, then up)"
            )
