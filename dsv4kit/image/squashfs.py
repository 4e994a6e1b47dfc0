"""A root file system as a squashfs that enroot starts as if it had imported it.

enroot keeps of an image's configuration four files: /etc/environment (ENV), /etc/fstab (VOLUME), /etc/rc (WORKDIR,
ENTRYPOINT, CMD; labels as comments) and an empty /etc/rc.local.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4kit.errors import UserError
from dsv4kit.packages import SYSTEM_PATH

PROGRAMS = {"mksquashfs": "squashfs-tools", "unsquashfs": "squashfs-tools"}

# Level 3 packs 5 to 9 times faster than enroot's default (lzo -noD), into half of its size, and reads as fast.
COMPRESSION = ("-comp", "zstd", "-Xcompression-level", "3")
# `-exit-on-error`: a file that cannot be read ends it, instead of being left out with a warning.
OPTIONS = (*COMPRESSION, "-exit-on-error")
_LIMIT_S = 3600


@dataclass(frozen=True)
class ImageConfig:
    """An image's configuration, as OCI names it. `architecture` as `uname -m` says it."""

    architecture: str
    env: Sequence[str] = ()
    working_dir: str = ""
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    volumes: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


def prepare(root: Path, config: ImageConfig, source: str) -> None:
    """Writes enroot's files into `root`; `source` names the image in a comment.

    Raises UserError for a variable whose value has a line break, which /etc/environment cannot hold.
    """
    files = {
        "etc/environment": environment(config.env),
        "etc/fstab": "".join(f"tmpfs {volume} tmpfs x-create=dir,rw,nosuid,nodev\n" for volume in config.volumes),
        "etc/rc": rc(config, source),
        "etc/rc.local": "",
        "etc/profile.d/00-image-path.sh": login_path(config.env),
    }
    for name, text in files.items():
        path = inside(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            path.unlink()  # Debian links none of these; a link could lead out of the image
        path.write_text(text)
        path.chmod(0o644)
    # The file system is read-only when it is started: nothing can be made then.
    for directory in (config.working_dir, "/proc", "/sys", "/dev", "/run"):
        inside(root, directory).mkdir(parents=True, exist_ok=True)
    if not (temporary := inside(root, "/tmp")).is_dir():
        temporary.mkdir()
        temporary.chmod(0o1777)


def inside(root: Path, name: str) -> Path:
    """A path of the image below `root`, links in its directories followed as they lead inside the image."""
    done = Path("/")
    pending = [part for part in reversed(name.split("/")) if part not in ("", ".")]
    for _ in range(1000):
        if not pending:
            break
        part = pending.pop()
        if part == "..":
            done = done.parent
            continue
        here = root / done.relative_to("/") / part
        if pending and here.is_symlink():
            target = os.readlink(here)
            done = Path("/") if target.startswith("/") else done
            pending += [piece for piece in reversed(target.split("/")) if piece not in ("", ".")]
        else:
            done = done / part
    else:
        raise UserError(f"{name}: links go round in a circle in this image")
    return root / done.relative_to("/")


def environment(env: Sequence[str]) -> str:
    """/etc/environment: a line per variable. enroot's own settings stay the host's."""
    lines = []
    for entry in env:
        name = entry.partition("=")[0]
        if "\n" in entry:
            raise UserError(f"ENV {name}: its value has a line break, which /etc/environment cannot hold")
        if not name.startswith("ENROOT_"):
            lines.append(entry + "\n")
    return "".join(lines)


def login_path(env: Sequence[str]) -> str:
    """The image's PATH for a login shell, with which enroot starts /etc/rc: Debian's /etc/profile sets it anew."""
    path = [entry.partition("=")[2] for entry in env if entry.startswith("PATH=")]
    return f"export PATH={shlex.quote(path[-1])}\n" if path else ""


def rc(config: ImageConfig, source: str) -> str:
    """/etc/rc: the working directory, the site's hooks in rc.local, then the entrypoint with what is to be run."""
    comments = [f"# from {_line(source)}", *(f"# {_line(f'{key} {text}')}" for key, text in config.labels.items())]
    entrypoint = shlex.join(config.entrypoint)
    default = shlex.join([*config.entrypoint, *(config.command or ([] if config.entrypoint else ["/bin/sh"]))])
    directory = shlex.quote(config.working_dir or "/")
    return "\n".join(
        [
            *comments,
            f"mkdir -p {directory} 2>/dev/null",
            f"cd {directory} || exit 1",
            "unset OLDPWD",
            "[ ! -s /etc/rc.local ] || . /etc/rc.local",
            f'if [ "$#" -gt 0 ]; then exec {entrypoint + " " if entrypoint else ""}"$@"; fi',
            f"exec {default}",
            "",
        ]
    )


def write(root: Path, out: Path) -> None:
    """Packs `root` into the file `out`, everything owned by root, without what is in /dev, /proc and /sys.

    `out` must not exist yet. Raises UserError with mksquashfs' own words.
    """
    argv = ["mksquashfs", str(root), str(out), "-noappend", "-no-progress", "-all-root", *OPTIONS]
    argv += ["-wildcards", "-e", "dev/*", "proc/*", "sys/*"]
    # With SOURCE_DATE_EPOCH of a build in the environment mksquashfs sets times by it, or dies of its own options.
    env = {"PATH": SYSTEM_PATH, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{out}: mksquashfs was not done after {_LIMIT_S} s") from None
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()] or ["no message"]
        said = next((line for line in lines if "FATAL" in line or "rror" in line or "ailed" in line), lines[0])
        raise UserError(f"{out}: mksquashfs failed: {said.strip()}")


def _line(text: str) -> str:
    return " ".join(text.split())
