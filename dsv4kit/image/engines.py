"""docker, podman and buildah, and which of them is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dsv4kit import packages
from dsv4kit.errors import UserError, nearest
from dsv4kit.image.engine import PLATFORMS, READING, Build, Engine, config_of
from dsv4kit.image.progress import Progress
from dsv4kit.image.squashfs import ImageConfig


class Docker(Engine):
    """Docker; its daemon does the work, so the host's files cannot be shown to a RUN."""

    program, scheme = "docker", "dockerd://"
    # With BuildKit, which `env` asks for; before that only a comment at the top of the Dockerfile turns mounts on.
    cache_mounts_from = (20, 10)

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
    # The first with buildah 1.24 inside.
    cache_mounts_from = (4, 0)

    def _build_command(self, build: Build) -> list[str]:
        return ["build", *_buildah_options(build)]


class Buildah(Engine):
    """Buildah; as root in a storage of the kit's own, which `rm -r` of the cache removes with everything else."""

    program = "buildah"
    cache_mounts_from = (1, 24)

    @property
    def env(self) -> dict[str, str]:
        if os.geteuid() != 0:
            return dict(os.environ)
        # Cache mounts and layers that are being written lie below TMPDIR.
        own = {"CONTAINERS_STORAGE_CONF": str(self.directory / "storage.conf"), "TMPDIR": str(self.directory / "tmp")}
        return {**os.environ, **own}

    def usable(self) -> str | None:
        if os.geteuid() == 0:
            # Debian has no /etc/containers/policy.json without it.
            with contextlib.suppress(UserError):
                packages.require({"buildah": "buildah"}, "building an image")
        return super().usable()

    def prepare(self) -> list[str]:
        if os.geteuid() != 0:
            return super().prepare()
        (self.directory / "tmp").mkdir(parents=True, exist_ok=True)
        # overlay: the other driver that works everywhere, vfs, keeps a whole copy for each layer.
        lines = ["[storage]", 'driver = "overlay"', f'graphroot = "{self.directory}/storage"']
        lines.append(f'runroot = "{self.directory}/run"')
        (self.directory / "storage.conf").write_text("\n".join(lines) + "\n")
        return super().prepare()

    def left_over(self) -> list[str]:
        # As root the storage is the kit's own, and whoever holds the lock is its only user.
        return self.containers() if os.geteuid() == 0 else super().left_over()

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
        return self._config_from(
            ("inspect", "--type=image", image),
            lambda found: config_of(found["OCIv1"].get("config") or {}, found["OCIv1"]["architecture"]),
        )

    @contextlib.contextmanager
    def files(self, image: str) -> Iterator[Path]:
        name = self.run("from", "--pull-never", f"--name={READING}-{os.getpid()}", image).stdout.strip()
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
        return self.run("containers", "--all", "--format={{.ContainerName}}", check=False).stdout.split()


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


def _buildah_options(build: Build) -> list[str]:
    # chroot: needs no cgroups and no runtime, so it works in virtual machines and containers; a build needs no more
    # isolation. docker: the format that keeps SHELL and HEALTHCHECK.
    # force-rm: of a build that fails no container is left.
    options = ["--format=docker", "--isolation=chroot", "--pull=missing", "--force-rm"]
    options += [f"--volume={mount}" for mount in build.mounts]
    if build.architecture != os.uname().machine:
        options.append(f"--platform=linux/{PLATFORMS[build.architecture]}")
    return options
