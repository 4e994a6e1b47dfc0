"""docker, podman and buildah: one of them builds the image and hands out its configuration and its files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4kit import packages
from dsv4kit.errors import UserError, nearest
from dsv4kit.image.progress import Progress, reason, run_logged
from dsv4kit.image.squashfs import ImageConfig

PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64"}
# Of containers that only exist while an image's files are read: what is left of one is from a build that was killed.
_READING = "dsv4kit-reading"
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


class Engine:
    """What all engines have in common; `program` is the command. Every failure is a UserError."""

    program = ""
    # As enroot spells an image of this engine; None: enroot cannot read from it.
    scheme: str | None = None

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

    def prepare(self) -> None:
        """Clears away what a build that was killed has left; the caller holds the lock of all builds."""
        for name in self.containers():
            if name.startswith(_READING):
                self.run("rm", name, check=False)

    def build(self, build: Build, log: Path, progress: Progress) -> None:
        """Builds and tags; all output goes to `log`."""
        arguments = [f"--build-arg={name}={value}" for name, value in build.arguments.items()]
        argv = [self.program, *self._build_command(build), f"--tag={build.tag}", *arguments]
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
        found = json.loads(self.run("image", "inspect", image).stdout)[0]
        return config_of(found.get("Config") or {}, found["Architecture"])

    @contextlib.contextmanager
    def files(self, image: str) -> Iterator[Path]:
        """The image's files in a directory that may be written to; gone afterwards, whatever happens."""
        name = f"{_READING}-{os.getpid()}"
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
            with subprocess.Popen(tar, stdout=subprocess.PIPE, env=self.env) as source:
                unpack = ["tar", "-x", "-C", str(root), "--exclude=dev/*", "--exclude=./dev/*"]
                done = subprocess.run(unpack, stdin=source.stdout, capture_output=True, text=True)
            if done.returncode != 0 or source.returncode != 0:
                raise UserError(
                    f"`{' '.join(tar[:2])}`: its files could not be unpacked: {reason(done.stderr.splitlines())}"
                )
            yield root
        finally:
            remove_tree(root)


class Docker(Engine):
    """Docker; its daemon does the work, so the host's files cannot be shown to a RUN."""

    program, scheme = "docker", "dockerd://"

    def usable(self) -> str | None:
        if missing := super().usable():
            return missing
        done = self.run("version", "--format={{.Server.Version}}", check=False)
        if done.returncode == 0:
            return None
        if "permission denied" in done.stderr.lower():
            return "no permission to use its daemon (group docker, or root)"
        return "its daemon does not answer"

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "DOCKER_BUILDKIT": "1"}

    def storage(self) -> Path:
        return Path(self._info("{{.DockerRootDir}}") or self.directory)

    def _build_command(self, build: Build) -> list[str]:
        return ["build", "--progress=plain", f"--platform=linux/{PLATFORMS[build.architecture]}"]


class Podman(Engine):
    """Podman, in its own storage."""

    program, scheme = "podman", "podman://"

    def _build_command(self, build: Build) -> list[str]:
        return ["build", *_buildah_options(build)]


class Buildah(Engine):
    """Buildah; as root in a storage of the kit's own, which `rm -r` of the cache removes with everything else."""

    program = "buildah"

    @property
    def env(self) -> dict[str, str]:
        if os.geteuid() != 0:
            return dict(os.environ)
        return {**os.environ, "CONTAINERS_STORAGE_CONF": str(self.directory / "storage.conf")}

    def usable(self) -> str | None:
        if os.geteuid() == 0:
            # Debian has no /etc/containers/policy.json without it.
            with contextlib.suppress(UserError):
                packages.require({"buildah": "buildah"}, "building an image")
        return super().usable()

    def prepare(self) -> None:
        if os.geteuid() != 0:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        # overlay: the other driver that works everywhere, vfs, keeps a whole copy for each layer.
        lines = ["[storage]", 'driver = "overlay"', f'graphroot = "{self.directory}/storage"']
        lines.append(f'runroot = "{self.directory}/run"')
        (self.directory / "storage.conf").write_text("\n".join(lines) + "\n")
        self.run("rm", "--all", check=False)

    def build(self, build: Build, log: Path, progress: Progress) -> None:
        try:
            super().build(build, log, progress)
        except BaseException:
            if os.geteuid() == 0:
                self.run("rm", "--all", check=False)  # whatever was building in our storage, which is ours alone
            raise

    def _build_command(self, build: Build) -> list[str]:
        return ["bud", "--layers", *_buildah_options(build)]

    def storage(self) -> Path:
        return self.directory if os.geteuid() == 0 else Path(self._info("{{.store.GraphRoot}}") or self.directory)

    def has(self, image: str) -> bool:
        return self.run("inspect", "--type=image", image, check=False).returncode == 0

    def add(self, rootfs: Path, image: str) -> None:
        name = self.run("from", "scratch").stdout.strip()
        try:
            self.run("add", "--quiet", name, str(rootfs), "/")
            self.run("config", "--cmd=/bin/bash", name)
            self.run("commit", "--quiet", name, image)
        finally:
            self.run("rm", name, check=False)

    def config(self, image: str) -> ImageConfig:
        found = json.loads(self.run("inspect", "--type=image", image).stdout)["OCIv1"]
        return config_of(found.get("config") or {}, found["architecture"])

    @contextlib.contextmanager
    def files(self, image: str) -> Iterator[Path]:
        name = self.run("from", "--pull-never", f"--name={_READING}-{os.getpid()}", image).stdout.strip()
        try:
            if os.geteuid() == 0:
                yield Path(self.run("mount", name).stdout.strip())
            else:
                script = 'root=$(buildah mount "$1") && exec tar -C "$root" -c .'
                with self._unpacked(["buildah", "unshare", "sh", "-c", script, "sh", name]) as root:
                    yield root
        finally:
            self.run("rm", name, check=False)  # unmounts it too

    def containers(self) -> list[str]:
        """Names of all containers, running or not."""
        return self.run("containers", "--format={{.ContainerName}}", check=False).stdout.split()


ENGINES: tuple[type[Engine], ...] = (Docker, Podman, Buildah)


def choose(name: str | None, directory: Path) -> Engine:
    """The engine of that name, or the first that can be used here. Raises UserError where there is none."""
    known = {engine.program: engine for engine in ENGINES}
    if name is not None and name not in known:
        raise UserError(f"ENGINE={name!r}: unknown; allowed: {', '.join(known)}{nearest(name, known)}")
    reasons = []
    for engine in [known[name]] if name else list(known.values()):
        made = engine(directory)
        problem = made.usable()
        if problem is None:
            return made
        reasons.append(f"{engine.program}: {problem}")
    wanted = f"ENGINE={name}" if name else "no engine to build an image with"
    raise UserError(f"{wanted}: {'; '.join(reasons)}")


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
    subprocess.run(["chmod", "-R", "u+rwX", "--", str(root)], capture_output=True)
    shutil.rmtree(root, ignore_errors=True)


def _buildah_options(build: Build) -> list[str]:
    # chroot: needs no cgroups and no runtime, so it works in virtual machines and containers; a build needs no more
    # isolation. docker: the format that keeps SHELL and HEALTHCHECK.
    # force-rm: of a build that fails no container is left.
    options = ["--format=docker", "--isolation=chroot", "--pull=false", "--force-rm"]
    options += [f"--volume={mount}" for mount in build.mounts]
    if build.architecture != os.uname().machine:
        options.append(f"--platform=linux/{PLATFORMS[build.architecture]}")
    return options
