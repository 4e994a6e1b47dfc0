"""An image for real, small: buildah, our squashfs writer, entering it; and nothing left when a build is ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv4kit import packages
from dsv4kit.errors import UserError
from dsv4kit.image import building, contents, engine, engines, importing, record, squashfs, wheels
from dsv4kit.image.context import BuildContext
from dsv4kit.image.progress import Progress

ENTER = Path(__file__).parents[2] / "dsv4kit" / "node" / "enter_image.sh"
NEEDED = {"buildah": "buildah", "bwrap": "bubblewrap", **squashfs.PROGRAMS}
BASE, IMAGE = "localhost/test-base:1", "localhost/test:1"
DOCKERFILE = """
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS kernels
RUN mkdir /wheels /wheels/a; echo compiled > /wheels/a/a-1-py3-none-any.whl
FROM scratch AS wheels
COPY --from=kernels /wheels /wheels
FROM ${BASE_IMAGE} AS waits
RUN echo begun > /begun; sleep 600
FROM ${BASE_IMAGE} AS one
ENV PATH=/opt/tools:/usr/bin:/bin GREETING="it's 5 %"
RUN set -eu; mkdir /opt /opt/tools; cat /settings/file > /opt/tools/hello; chmod 755 /opt/tools/hello
FROM one
ARG WHO
RUN echo "${WHO}" > /who
COPY data /data
WORKDIR /opt/work
LABEL git.kit="abc"
"""


class Lab:
    """A cache of its own with a storage, as the command line uses it."""

    def __init__(self, root: Path) -> None:
        self.cache, self.log, self.said = root / "cache", root / "log", list[str]()
        self.engine = engines.Buildah(self.cache / "images" / "build")

    @property
    def progress(self) -> Progress:
        return Progress(self.said.append)

    def build(self, context: Path, who: str = "me") -> None:
        settings = context.with_name("settings")
        arguments = {"BASE_IMAGE": BASE, "WHO": who}
        build = engine.Build(
            context, context / "Dockerfile", IMAGE, os.uname().machine, arguments, [f"{settings}:/settings:ro"]
        )
        self.engine.build(build, self.log, self.progress)

    def left(self) -> list[str]:
        """Containers and mounts of its storage."""
        found = self.engine.run("containers", "--quiet", "--all").stdout.split()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return found + [line for line in mounts if str(self.cache) in line and "storage/overlay rw" not in line]


def small_system(root: Path) -> None:
    """A shell and a few programs with their libraries, from this machine."""
    for name in ("bash", "sh", "cat", "mkdir", "chmod", "env", "sleep", "true"):
        program = Path(shutil.which(name) or "")
        target = root / "usr" / "bin" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(program.resolve(), target)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            place = root / "usr" / library.removeprefix("/usr").lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, place)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc").mkdir()
    (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    if os.geteuid() != 0:
        pytest.skip("as root alone the storage is the kit's own")
    try:
        packages.require(NEEDED, "this test")
    except UserError as error:
        pytest.skip(str(error))
    root = tmp_path_factory.mktemp("image")
    made = Lab(root)
    made.engine.prepare()
    small_system(root / "rootfs")
    made.engine.add(root / "rootfs", BASE)
    return made


@pytest.fixture(scope="module")
def context(lab: Lab) -> Path:
    made = lab.cache.parent / "context"
    made.mkdir()
    (made / "Dockerfile").write_text(DOCKERFILE)
    (made / "data").write_bytes(os.urandom(2_000_000))
    settings = made.with_name("settings")
    settings.mkdir()
    (settings / "file").write_text('#!/bin/sh\necho "$GREETING"\n')
    return made


@pytest.fixture(scope="module")
def squash(lab: Lab, context: Path) -> Path:
    lab.build(context)
    out = lab.cache.parent / "out" / "test.sqsh"
    importing.to_file(lab.engine, IMAGE, out, os.uname().machine, lab.log, lab.progress, stack_hash="x")
    return out


def test_the_squashfs_has_the_image_its_configuration_and_a_record(lab: Lab, squash: Path, context: Path) -> None:
    assert contents.read(str(squash), "data") == (context / "data").read_bytes()
    assert contents.read(str(squash), "who") == b"me\n"
    assert b"GREETING=it's 5 %\n" in (contents.read(str(squash), "etc/environment") or b"")
    rc = (contents.read(str(squash), "etc/rc") or b"").decode()
    assert "# git.kit abc\n" in rc
    assert "cd /opt/work" in rc
    assert contents.architecture(str(squash)) == os.uname().machine
    known = record.load(squash)
    assert known is not None
    assert (known.source, known.written_by, known.stack_hash) == (IMAGE, "mksquashfs", "x")
    assert any("build 1/" in line for line in lab.said)
    # What the build alone was shown stays outside.
    assert contents.read(str(squash), "settings/file") is None
    assert lab.left() == []


def test_it_can_be_entered(lab: Lab, squash: Path) -> None:
    empty = lab.cache.parent / "empty"
    empty.mkdir()
    done = subprocess.run(
        ["bash", ENTER, squash, empty, empty, "ro", "/opt/work", "--", "hello"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "it's 5 %\n"), done.stderr


def test_wheels_of_a_stage_are_kept_and_ready_for_the_next_build(
    lab: Lab, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4KIT_CACHE", str(lab.cache))
    keys = {name: {"name": name, "source": "1", "architecture": "x86_64", "gpu": 90} for name in ("a", "b")}
    arguments = {"BASE_IMAGE": BASE, "WHO": "me"}
    build = engine.Build(context, context / "Dockerfile", IMAGE, os.uname().machine, arguments)
    made = BuildContext(context, "h100", "s", "x86_64", "x", IMAGE, BASE, arguments, to_compile=keys)
    building._keep_wheels(lab.engine, build, made, lab.log, lab.progress)
    assert [path.name for path in wheels.ready(keys["a"])] == ["a-1-py3-none-any.whl"]
    assert wheels.ready(keys["b"]) == []
    assert lab.left() == []


def test_what_a_killed_build_has_left_is_named_and_removed(
    lab: Lab, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `kill -9` of everything leaves something; containers and their mounts then stay until the next build."""
    argv = ["buildah", "bud", "--layers", "--format=docker", "--isolation=chroot", "--pull=missing", "--target=waits"]
    argv += [f"--build-arg=BASE_IMAGE={BASE}", "--tag=localhost/never:1", str(context)]
    with subprocess.Popen(
        argv, env=lab.engine.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as build:
        deadline = time.monotonic() + 120
        while not list(lab.cache.glob("images/build/storage/overlay/*/diff/begun")):
            assert build.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(build.pid, signal.SIGKILL)
    half = lab.cache / "images" / "context-killed"
    half.mkdir()
    assert len(lab.left()) > 1
    env = {**os.environ, "DSV4KIT_CACHE": str(lab.cache)}
    argv = [sys.executable, "-m", "dsv4kit.cli.main", "image", "clean", "--engine=buildah"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"left by a build that was killed, removed: container \S+-working-container", done.stdout)
    assert f"removed: directory {half}\n" in done.stdout
    assert lab.left() == []
    assert lab.engine.has(BASE)
    again = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert again.stdout == "image: nothing is left of any build\n"


def test_a_build_that_fails_says_where_and_leaves_nothing(lab: Lab, context: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(context, broken)
    (broken.with_name("settings")).mkdir()
    (broken / "Dockerfile").write_text(DOCKERFILE.replace("COPY data", "COPY nothing"))
    with pytest.raises(UserError, match=r"buildah build failed at step 4/\d+ COPY nothing /data: .*nothing"):
        lab.build(broken, "you")
    assert lab.left() == []


@pytest.fixture(scope="module")
def large(lab: Lab, squash: Path) -> str:
    """An image whose packing takes a moment."""
    root = lab.cache.parent / "large"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "large").write_bytes(os.urandom(80_000_000))
    lab.engine.add(root, "localhost/large:1")
    return "localhost/large:1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_import_that_is_ended_leaves_no_half_file_and_no_container(
    lab: Lab, large: str, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "large.sqsh"
    argv = [sys.executable, "-m", "dsv4kit.cli.main", "image", "import", large, f"--image={out}"]
    argv += ["--engine=buildah"]
    env = {**os.environ, "DSV4KIT_CACHE": str(lab.cache)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) != 0
    if number == signal.SIGTERM:
        assert lab.left() == []
        assert list(tmp_path.iterdir()) == []
    else:
        # Nobody could clear away then; the next one does.
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert lab.left() == []
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "large.sqsh",
            "large.sqsh.json",
            "large.sqsh.sha256",
        ]
