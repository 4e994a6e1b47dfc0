"""A base image of Debian or Ubuntu made on this machine, for when no registry can be reached."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from dsv4kit import packages
from dsv4kit.errors import UserError
from dsv4kit.image.engine import PLATFORMS, Engine, remove_tree
from dsv4kit.image.progress import Progress, run_logged

LOCAL = "localhost/dsv4kit-base:"
_SUITE = re.compile(r"(?:.*/)?debian:([a-z]+)(?:-slim)?(?:@.*)?|(?:.*/)?ubuntu:([0-9.]+)(?:@.*)?")
_UBUNTU_SUITES = {"24.04": "noble"}


@dataclass(frozen=True)
class Distribution:
    """Where one comes from. `script`: debootstrap's, where it may be older than the suite."""

    image: str
    mirror: str
    in_sources: str
    keyring: str
    components: str = "main"
    script: str | None = None


_DEBIAN = Distribution(
    image="debian:{suite}-slim",
    mirror="http://deb.debian.org/debian",
    in_sources="debian",
    keyring="/usr/share/keyrings/debian-archive-keyring.gpg",
)
_UBUNTU = Distribution(
    image="ubuntu:24.04",
    mirror="http://archive.ubuntu.com/ubuntu",
    in_sources="ubuntu",
    keyring="/usr/share/keyrings/ubuntu-archive-keyring.gpg",
    components="main,universe",
    script="/usr/share/debootstrap/scripts/gutsy",  # what every later suite's script is a link to
)
# Debian 12 has no package of Ubuntu's keys. This is Ubuntu 24.04's own, whatever the network brings.
_UBUNTU_KEYS = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
_UBUNTU_KEYS_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
_KEYRING_PACKAGES = {_DEBIAN.keyring: "debian-archive-keyring"}
_LIMIT_S = 120


def suite_of(image: str) -> str | None:
    """`bookworm` of `debian:bookworm-slim`, `noble` of `ubuntu:24.04`; None of any other image."""
    found = _SUITE.fullmatch(image)
    return (found[1] or _UBUNTU_SUITES.get(found[2])) if found else None


def image_of(local: str) -> str | None:
    """The image that one of the kit's own bases (`local_name`) stands for; None of any other name."""
    suite = local.removeprefix(LOCAL).rpartition("-")[0] if local.startswith(LOCAL) else ""
    return _distribution(suite).image.format(suite=suite) if suite else None


def _distribution(suite: str) -> Distribution:
    return _UBUNTU if suite in _UBUNTU_SUITES.values() else _DEBIAN


def qualified(image: str) -> str:
    """The name with its registry. Without one it is docker's hub to docker, and a question to podman and buildah."""
    first, slash, _ = image.partition("/")
    if slash and (first == "localhost" or re.search(r"[.:]", first)):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


def local_name(image: str, architecture: str) -> str:
    """The name under which an image of Debian or Ubuntu is kept here, wherever it came from."""
    return f"{LOCAL}{suite_of(image)}-{PLATFORMS[architecture]}"


def provide(engine: Engine, image: str, architecture: str, log: Path, progress: Progress) -> None:
    """Has the engine know an image of Debian or Ubuntu by its `local_name`: fetched, or else made with debootstrap.

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


def mirror(sources: str, suite: str = "bookworm") -> str:
    """The mirror this machine takes the distribution from, by its apt sources; its own where they name none."""
    distribution = _distribution(suite)
    address = rf"(https?://\S*/{distribution.in_sources})"
    found = re.search(rf"^(?:URIs:\s*|deb\s+(?:\[[^]]*\]\s*)?){address}/?(?:\s|$)", sources, re.MULTILINE)
    return found[1] if found else distribution.mirror


def _make(
    engine: Engine, suite: str, image: str, architecture: str, cause: UserError, log: Path, progress: Progress
) -> None:
    if os.geteuid() != 0 or architecture != os.uname().machine:
        why = "making one here needs root" if os.geteuid() else f"none for {architecture} can be made on this machine"
        raise UserError(f"base: {cause}; {why}; BASE=<image> names one that can be reached")
    distribution, source = _distribution(suite), mirror(_apt_sources(), suite)
    packages.require({"debootstrap": "debootstrap", **_keyring_package(distribution)}, "making a base image")
    engine.directory.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="base-", dir=engine.directory))
    try:
        # With its certificates, so that the build's first RUN can already speak TLS.
        argv = ["debootstrap", "--variant=minbase", "--include=ca-certificates"]
        argv += [f"--components={distribution.components}", f"--keyring={_keyring(distribution, source, engine)}"]
        argv += [suite, str(root), source, *([distribution.script] if distribution.script else [])]
        env = {"PATH": packages.SYSTEM_PATH, "LC_ALL": "C", "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
        run_logged(argv, log, progress, env, "debootstrap")
        for directory in ("var/cache/apt/archives", "var/lib/apt/lists"):
            for file in (root / directory).glob("*.deb" if "archives" in directory else "*_*"):
                file.unlink()
        engine.add(root, image)
    finally:
        unmount_below(root)
        remove_tree(root)


def _keyring_package(distribution: Distribution) -> dict[str, str]:
    known = _KEYRING_PACKAGES.get(distribution.keyring)
    return {distribution.keyring: known} if known else {}


def _keyring(distribution: Distribution, source: str, engine: Engine) -> str:
    """The distribution's keys: this machine's, or, of Ubuntu, those of its own package at the known checksum."""
    if os.path.exists(distribution.keyring) or distribution is not _UBUNTU:
        return distribution.keyring
    place = engine.directory / "keys"
    address = f"{source}/{_UBUNTU_KEYS}"
    try:
        with urllib.request.urlopen(address, timeout=_LIMIT_S) as answer:
            content = answer.read()
    except OSError as error:
        raise UserError(f"base: {address}: {error}") from None
    if hashlib.sha256(content).hexdigest() != _UBUNTU_KEYS_SHA256:
        raise UserError(f"base: {address}: not the package of keys that is known here")
    remove_tree(place)
    place.mkdir(parents=True)
    (place / "keys.deb").write_bytes(content)
    subprocess.run(["dpkg-deb", "-x", str(place / "keys.deb"), str(place)], check=True, capture_output=True)
    return f"{place}{distribution.keyring}"


def _apt_sources() -> str:
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    return "\n".join(file.read_text(errors="replace") for file in files if file.is_file())


def unmount_below(root: Path) -> None:
    """debootstrap mounts /proc and /sys in its target, and leaves them there when it is interrupted."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((point for point in mounted if point.startswith(f"{root}/")), reverse=True):
        subprocess.run(["umount", "--lazy", "--", point], capture_output=True)
