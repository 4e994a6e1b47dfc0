"""`system`, `packages` and the early proof of pro-grpo for real, on an Ubuntu 24.04 made here: no GPU, no registry.

    make test-image-gpu MEGATRON_LM=DIRECTORY MEGATRON_BRIDGE=DIRECTORY VERL=DIRECTORY

Takes a quarter of an hour the first time, 40 GB of disk while it runs and 25 GB afterwards, in
`<cache>/images-gpu-test`, which `rm -r` removes; later runs begin where a layer differs. The directories stand for
the repositories: what is in them is built, whether or not it is the stack's commit, and said in the first line.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dsv4kit.config.cache import cache_dir
from dsv4kit.config.loading import hardware_of
from dsv4kit.image import base, given, host_settings, space
from dsv4kit.image.context import BuildContext, write_stack
from dsv4kit.image.engine import Build, remove_tree
from dsv4kit.image.engines import Buildah
from dsv4kit.image.progress import Progress
from dsv4kit.image.stack import Stack, stacks

PLACES = {"MEGATRON_LM": "megatron-core", "MEGATRON_BRIDGE": "megatron-bridge", "VERL": "verl"}
# Of x86_64, whatever the machine's GPU: kernels are not compiled here.
HARDWARE = "h200"
PACKAGES, EARLY = "localhost/dsv4kit-gpu-test:packages", "localhost/dsv4kit-gpu-test:early"
_DISK_GB = 40.0
_UNKNOWN = "0" * 40


def missing() -> str:
    """What keeps the tests from running, in one line; empty when nothing does."""
    for name in PLACES:
        if not (place := os.environ.get(f"DSV4KIT_{name}")):
            return f"no {name}=DIRECTORY; " + (__doc__ or "").splitlines()[2].strip()
        if not Path(place).expanduser().is_dir():
            return f"{name}={place}: no such directory"
    if os.geteuid() != 0:
        return "building needs root here"
    if os.uname().machine != "x86_64":
        return f"this machine is {os.uname().machine}; the test is of x86_64"
    return ""


class Lab:
    """The storage, and what is built in it."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_dir() / "images-gpu-test"
        self.engine = Buildah(self.root / "build")
        self.log = self.root / "build.log"
        self.progress = Progress(lambda line: print(line, flush=True))
        self.context: BuildContext | None = None

    def build_packages(self) -> None:
        """The base, the stages `system`, `compilable` and `packages`; the context is kept for what follows."""
        if unusable := self.engine.usable():
            raise RuntimeError(f"buildah: {unusable}")
        self.engine.prepare()
        if not self.engine.has(PACKAGES):
            space.require({self.root: _DISK_GB})
        local = base.local_name("ubuntu:24.04", "x86_64")
        base.provide(self.engine, "ubuntu:24.04", "x86_64", self.log, self.progress)
        self.context = self._write(local)
        self._build("packages", PACKAGES)

    def _write(self, local: str) -> BuildContext:
        directory = self.root / "context"
        remove_tree(directory)
        stack, said = self._stack()
        return write_stack(stack, hardware_of(HARDWARE), directory, {"BASE_IMAGE": local, **said})

    def _stack(self) -> tuple[Stack, dict[str, str]]:
        """pro-grpo with the directories for its sources: each as a tarball, checked by the tree it has."""
        stack = stacks()["pro-grpo"]
        git, said = dict(stack.git), {"VERL_SHA": _UNKNOWN}
        for name, package in PLACES.items():
            place = Path(os.environ[f"DSV4KIT_{name}"]).expanduser().resolve()
            plain = self.root / "sources" / package
            remove_tree(plain)
            plain.mkdir(parents=True)
            pack = f"tar -C {shlex.quote(str(place))} --exclude=./.git -c . | tar -C {shlex.quote(str(plain))} -x"
            subprocess.run(["sh", "-c", pack], check=True)
            tree, wanted = given.tree_of(plain), git[package].tree
            same = "the stack's" if tree == wanted else f"not the stack's {wanted}"
            self.progress(f"{package}: {place}, tree {tree}, {same}")
            tarball = self.root / "sources" / f"{package}.tar"
            subprocess.run(["tar", "-C", plain, "-c", "-f", tarball, "."], check=True)
            git[package] = git[package].model_copy(update={"tree": tree, "contains": []})
            variable = next(each.variable for each in stack.repositories.values() if each.name == package)
            said[variable] = str(tarball)
        return stack.model_copy(update={"git": git}), said

    def _build(self, target: str, tag: str) -> None:
        assert self.context is not None
        context = self.context
        mounts = host_settings.mounts(self.engine.directory / "host", os.environ)
        arguments = {**context.build_args, "BASE_IMAGE": context.base_image}
        build = Build(context.directory, context.dockerfile, tag, "x86_64", arguments, mounts, target=target)
        self.engine.build(replace(build), self.log, self.progress)

    def build_early(self) -> None:
        """The stage whose last command is the early proof, as the Dockerfile has it. UserError where that fails."""
        self._build("early", EARLY)

    @contextmanager
    def container(self) -> Iterator[Container]:
        """A container of the packages with the sources and the kit in it, as the stage `early` is before its proof."""
        assert self.context is not None
        name = self.engine.run("from", "--pull-never", PACKAGES).stdout.strip()
        try:
            made = Container(self, name, Path(self.engine.run("mount", name).stdout.strip()))
            for source in ("sources", "kit", "image.json"):
                subprocess.run(["cp", "-r", self.context.directory / source, made.root / "opt" / "dsv4kit"], check=True)
            (made.site / "dsv4kit.pth").write_text("/opt/dsv4kit/kit\n")
            trees = " ".join(f"/opt/dsv4kit/sources/{name}/tree" for name in PLACES.values())
            made.sh(f"pip install --no-deps --no-build-isolation --no-index {trees}")
            yield made
        finally:
            self.engine.run("rm", name, check=False)


class Container:
    """One of buildah's working containers."""

    def __init__(self, lab: Lab, name: str, root: Path) -> None:
        self.lab, self.name, self.root = lab, name, root
        self.site = root / "opt" / "venv" / "lib" / "python3.12" / "site-packages"

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """A shell command, with the mounts of a build."""
        mounts = host_settings.mounts(self.lab.engine.directory / "host", os.environ)
        argv = ["buildah", "run", "--isolation=chroot", *(f"--volume={mount}" for mount in mounts), self.name, "--"]
        argv += ["sh", "-c", script]
        return subprocess.run(argv, env=self.lab.engine.env, capture_output=True, text=True, errors="replace")

    def sh(self, script: str) -> str:
        """The output of a command that has to work."""
        done = self.run(script)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def proof(self, environment: str = "") -> list[str]:
        """The lines of the early proof, as the Dockerfile runs it; `environment`: `NAME=VALUE ...` before it."""
        done = self.run(f"{environment} python -m dsv4kit.image.manifest --early /opt/dsv4kit")
        said = [line.removeprefix("dsv4kit: ") for line in done.stderr.splitlines() if line.startswith("dsv4kit: ")]
        assert (done.returncode == 0) == (not said), done.stderr[-3000:]
        return said
