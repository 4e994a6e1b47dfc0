"""What a container engine does here: it builds an image, and hands out its configuration and its files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4kit.errors import UserError
from dsv4kit.image.progress import Progress, reason, run_logged
from dsv4kit.image.squashfs import ImageConfig

PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64"}
# Of containers that only exist while an image's files are read: what is left of one is from a build that was killed.
READING = "dsv4kit-reading"
_LIMIT_S = 1800


@dataclass(frozen=True)
class Build:
    """One build: `arguments` are the Dockerfile's ARGs, `mounts` host files every RUN sees (`SRC:DST:ro`)."""

    context: Path
    dockerfile: Path
    tag: str
    architecture: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[str] = ()
    target: str | None = None
    """The stage to end with; none: the last."""


class Engine:
    """What all engines have in common; `program` is the command. Every failure is a UserError."""

    program = ""
    # As enroot spells an image of this engine; None: enroot cannot read from it.
    scheme: str | None = None
    # From this version on it knows `RUN --mount=type=cache`.
    cache_mounts_from = (0, 0)

    def __init__(self, directory: Path) -> None:
        """`directory` is this machine's, with room for the build."""
        self.directory = directory

    @property
    def env(self) -> dict[str, str]:
        """The environment its command runs in."""
        return dict(os.environ)

    def usable(self) -> str | None:
        """None, or why it cannot be used here."""
        return None if shutil.which(self.program) else "not installed"

    def prepare(self) -> list[str]:
        """Clears away what a build that was killed has left, and names it; the caller holds the lock of all builds."""
        left = self.left_over()
        for name in left:
            self.run("rm", name, check=False)  # unmounts it too
        return left

    def left_over(self) -> list[str]:
        """Containers that only a build of the kit's can have left."""
        return [name for name in self.containers() if name.startswith(READING)]

    def knows_cache_mounts(self) -> bool:
        """Whether `RUN --mount=type=cache` may stand in what it builds."""
        found = re.search(r"(\d+)\.(\d+)", self.run("--version", check=False).stdout)
        return found is not None and (int(found[1]), int(found[2])) >= self.cache_mounts_from

    def build(self, build: Build, log: Path, progress: Progress) -> None:
        """Builds and tags; all output goes to `log`."""
        arguments = [f"--build-arg={name}={value}" for name, value in build.arguments.items()]
        target = [f"--target={build.target}"] if build.target else []
        argv = [self.program, *self._build_command(build), *target, f"--tag={build.tag}", *arguments]
        run_logged(
            [*argv, f"--file={build.dockerfile}", str(build.context)], log, progress, self.env, f"{self.program} build"
        )

    def storage(self) -> Path:
        """Where it keeps images."""
        return Path(self._info("{{.Store.GraphRoot}}") or self.directory)

    def _info(self, what: str) -> str:
        return self.run("info", f"--format={what}", check=False).stdout.strip()

    def has(self, image: str) -> bool:
        """Whether the image is here."""
        return self.run("image", "inspect", image, check=False).returncode == 0

    def pull(self, image: str, architecture: str) -> None:
        """Fetches an image from its registry."""
        self.run("pull", f"--platform=linux/{PLATFORMS[architecture]}", image)

    def add(self, rootfs: Path, image: str) -> None:
        """Makes an image of one layer from a directory."""
        with subprocess.Popen(["tar", "-C", str(rootfs), "-c", "."], stdout=subprocess.PIPE) as tar:
            self.run("import", "--change=CMD /bin/bash", "-", image, stdin=tar.stdout)

    def config(self, image: str) -> ImageConfig:
        """The image's configuration."""
        return self._config_from(
            ("image", "inspect", image), lambda found: config_of(found[0].get("Config") or {}, found[0]["Architecture"])
        )

    def _config_from(self, arguments: Sequence[str], read: Callable[[Any], ImageConfig]) -> ImageConfig:
        said = self.run(*arguments).stdout
        try:
            return read(json.loads(said))
        except (ValueError, TypeError, LookupError, AttributeError):
            shown = " ".join(said.split())[:80]
            command = " ".join([self.program, *arguments])
            raise UserError(f"`{command}` does not say how the image is configured: {shown!r}") from None

    @contextlib.contextmanager
    def files(self, image: str) -> Iterator[Path]:
        """The image's files in a directory that may be written to; gone afterwards, whatever happens."""
        name = f"{READING}-{os.getpid()}"
        self.run("create", f"--name={name}", image, "/bin/true")
        try:
            with self._unpacked([self.program, "export", name]) as root:
                yield root
        finally:
            self.run("rm", name, check=False)

    def run(
        self, *arguments: str, check: bool = True, stdin: Any = subprocess.DEVNULL
    ) -> subprocess.CompletedProcess[str]:
        """One of its commands; UserError with its reason where it fails and `check` is set."""
        try:
            done = subprocess.run(
                [self.program, *arguments], env=self.env, stdin=stdin, capture_output=True, text=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"`{self.program} {arguments[0]}` was not done after {_LIMIT_S} s") from None
        if check and done.returncode != 0:
            raise UserError(f"`{self.program} {arguments[0]}` failed: {reason(done.stderr.splitlines())}")
        return done

    def _build_command(self, build: Build) -> list[str]:
        raise NotImplementedError

    def containers(self) -> list[str]:
        """Names of all containers, running or not."""
        return self.run("ps", "--all", "--format={{.Names}}", check=False).stdout.split()

    @contextlib.contextmanager
    def _unpacked(self, tar: list[str]) -> Iterator[Path]:
        """What a command writes as tar, in a directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        root = Path(tempfile.mkdtemp(prefix="rootfs-", dir=self.directory))
        try:
            with (
                tempfile.TemporaryFile("w+", errors="replace") as complaints,
                subprocess.Popen(tar, stdout=subprocess.PIPE, stderr=complaints, env=self.env) as source,
            ):
                unpack = ["tar", "-x", "-C", str(root), "--exclude=dev/*", "--exclude=./dev/*"]
                done = subprocess.run(unpack, stdin=source.stdout, capture_output=True, text=True, errors="replace")
                assert source.stdout is not None
                source.stdout.close()  # or it would wait for a reader that has failed
                status = source.wait()
                complaints.seek(0)
                said = [*complaints.read().splitlines(), *done.stderr.splitlines()]
            if done.returncode != 0 or status != 0:
                raise UserError(f"`{' '.join(tar[:2])}`: its files could not be unpacked: {reason(said)}")
            yield root
        finally:
            remove_tree(root)


def config_of(config: Mapping[str, Any], architecture: str) -> ImageConfig:
    """An OCI configuration object as ours."""
    names = {goarch: machine for machine, goarch in PLATFORMS.items()}
    return ImageConfig(
        architecture=names.get(architecture, architecture),
        env=tuple(config.get("Env") or ()),
        working_dir=config.get("WorkingDir") or "",
        entrypoint=tuple(config.get("Entrypoint") or ()),
        command=tuple(config.get("Cmd") or ()),
        volumes=tuple(config.get("Volumes") or ()),
        labels=dict(config.get("Labels") or {}),
    )


def remove_tree(root: Path) -> None:
    """Removes a tree, directories without permissions included."""
    with contextlib.suppress(OSError):  # without a chmod most of it goes all the same
        subprocess.run(["chmod", "-R", "u+rwX", "--", str(root)], capture_output=True)
    shutil.rmtree(root, ignore_errors=True)
