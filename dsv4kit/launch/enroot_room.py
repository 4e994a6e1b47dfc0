"""Whether a node has room for the container that enroot makes there of an image: for the doctor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

_GB = 1e9
# As `stat --file-system` names them: shared by all nodes, whose steps would make the same directories.
_SHARED = ("nfs", "lustre", "gpfs", "fhgfs", "beegfs", "ceph", "cephfs", "panfs", "wekafs", "smb2", "fuseblk")


@dataclass(frozen=True)
class Place:
    """One of enroot's directories on a node."""

    path: str
    file_system: str
    free: int
    writable: bool


@dataclass(frozen=True)
class HostLook:
    """What `enroot_host.sh look` wrote on one node: `places` as enroot calls them, `left` of jobs that are over."""

    node: str
    enroot: str
    places: dict[str, Place] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    squashfuse: bool = False


def parse(node: str, text: str) -> HostLook:
    """Lines of NAME|PATH|FILE SYSTEM|FREE BYTES|CAN BE WRITTEN; others are passed over."""
    enroot, places, left, squashfuse = "", dict[str, Place](), [], False
    for line in text.splitlines():
        words = line.split("|")
        if len(words) != 5:
            continue
        name, path, kind, free, can = words
        if name == "enroot":
            enroot = path
        elif name == "left":
            left.append(path)
        elif name == "squashfuse":
            squashfuse = True
        elif free.isdecimal():
            places[name] = Place(path, kind, int(free), can == "yes")
    return HostLook(node, enroot, places, tuple(left), squashfuse)


def findings(look: HostLook, unpacked: int | None) -> Iterator[tuple[bool, str]]:
    """(whether it is well, what is to be said). `unpacked`: bytes of the image's files, where that is known.

    pyxis unpacks a squashfs into the data directory at each step, unless it mounts it (`use_squashfuse=1`).
    """
    for name in ("data", "runtime"):
        place = look.places.get(name)
        if place is not None and not place.writable and place.free:
            yield False, f"{look.node}: ENROOT_{name.upper()}_PATH {place.path} cannot be made or written to"
    data = look.places.get("data")
    if data is None:
        yield True, f"{look.node}: it could not be seen where enroot keeps its containers"
    elif look.squashfuse:
        yield True, f"{look.node}: pyxis mounts the image (use_squashfuse=1), nothing is unpacked"
    else:
        where = f"{look.node}: containers go to {data.path} ({data.file_system}), {data.free / _GB:.0f} GB free"
        if data.file_system.startswith(_SHARED):
            yield (
                False,
                f"{where}: all nodes share it, and containers collide; ENROOT_DATA_PATH has to be local",
            )
        elif unpacked is not None and data.free < unpacked:
            yield False, f"{where}; the image has {unpacked / _GB:.0f} GB unpacked and would not start"
        else:
            memory = ", in memory" if data.file_system in ("tmpfs", "ramfs") else ""
            size = f"; the image takes {unpacked / _GB:.0f} GB of it{memory}" if unpacked is not None else ""
            yield True, f"{where}{size}"
    for path in look.left:
        yield False, f"{look.node}: {path} is left by a job that is over; `enroot remove -f {path.rpartition('/')[2]}`"
