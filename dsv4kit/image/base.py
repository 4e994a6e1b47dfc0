"""A Debian base image made on this machine, for when no registry can be reached."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from dsv4kit import packages
from dsv4kit.errors import UserError
from dsv4kit.image.engine import PLATFORMS, Engine, remove_tree
from dsv4kit.image.progress import Progress, run_logged

PROGRAMS = {
    "debootstrap": "debootstrap",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
}
_DEBIAN = "http://deb.debian.org/debian"
_SUITE = re.compile(r"(?:.*/)?debian:([a-z]+)(?:-slim)?(?:@.*)?")


def suite_of(image: str) -> str | None:
    """`bookworm` of `debian:bookworm-slim`; None of an image that is not Debian's."""
    found = _SUITE.fullmatch(image)
    return found[1] if found else None


def qualified(image: str) -> str:
    """The name with its registry. Without one it is docker's hub to docker, and a question to podman and buildah."""
    first, slash, _ = image.partition("/")
    if slash and (first == "localhost" or re.search(r"[.:]", first)):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


def local_name(image: str, architecture: str) -> str:
    """The name under which one of Debian's images is kept here, wherever it came from."""
    return f"localhost/dsv4kit-base:{suite_of(image)}-{PLATFORMS[architecture]}"


def provide(engine: Engine, image: str, architecture: str, log: Path, progress: Progress) -> None:
    """Has the engine know one of Debian's images by its `local_name`: fetched, or else made with debootstrap.

    Raises UserError where neither works.
    """
    name, suite = local_name(image, architecture), suite_of(image)
    assert suite is not None
    if engine.has(name):
        return
    remote = qualified(image)
    progress(f"base: fetching {remote}")
    try:
        engine.pull(remote, architecture)
        engine.run("tag", remote, name)
    except UserError as error:
        progress("base: no registry can be reached; making it with debootstrap (2 minutes)")
        _make(engine, suite, name, architecture, error, log, progress)


def mirror(sources: str) -> str:
    """The mirror this machine takes Debian from, by its apt sources; Debian's own where they name none."""
    found = re.search(r"^(?:URIs:\s*|deb\s+(?:\[[^]]*\]\s*)?)(https?://\S*/debian)/?(?:\s|$)", sources, re.MULTILINE)
    return found[1] if found else _DEBIAN


def _make(
    engine: Engine, suite: str, image: str, architecture: str, cause: UserError, log: Path, progress: Progress
) -> None:
    if os.geteuid() != 0 or architecture != os.uname().machine:
        why = "making one here needs root" if os.geteuid() else f"none for {architecture} can be made on this machine"
        raise UserError(f"base: {cause}; {why}; BASE=<image> names one that can be reached")
    packages.require(PROGRAMS, "making a base image")
    engine.directory.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="base-", dir=engine.directory))
    try:
        # With its certificates, so that the build's first RUN can already speak TLS.
        argv = [
            "debootstrap",
            "--variant=minbase",
            "--include=ca-certificates",
            suite,
            str(root),
            mirror(_apt_sources()),
        ]
        env = {"PATH": packages.SYSTEM_PATH, "LC_ALL": "C", "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
        run_logged(argv, log, progress, env, "debootstrap")
        for directory in ("var/cache/apt/archives", "var/lib/apt/lists"):
            for file in (root / directory).glob("*.deb" if "archives" in directory else "*_*"):
                file.unlink()
        engine.add(root, image)
    finally:
        _unmount_below(root)
        remove_tree(root)


def _apt_sources() -> str:
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    return "\n".join(file.read_text(errors="replace") for file in files if file.is_file())


def _unmount_below(root: Path) -> None:
    """debootstrap mounts /proc and /sys in its target, and leaves them there when it is interrupted."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((point for point in mounted if point.startswith(f"{root}/")), reverse=True):
        subprocess.run(["umount", "--lazy", "--", point], capture_output=True)
