"""Which engine is taken, what it is told, and that nothing of it is left; stand-ins write down how they were called."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tarfile
from pathlib import Path

import pytest

from dsv4kit import packages
from dsv4kit.errors import UserError
from dsv4kit.image import contents, engine, engines, importing, squashfs
from dsv4kit.image.progress import Progress

INSPECTED = json.dumps([{"Architecture": "amd64", "Config": {"Env": ["A=b"], "WorkingDir": "/w", "Labels": None}}])


class Programs:
    """A PATH of stand-ins beside the system's own programs."""

    def __init__(self, root: Path) -> None:
        self.bin, self.log = root / "bin", root / "calls"
        self.bin.mkdir()

    def add(self, name: str, body: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)  # it may be a link to the real program, which must not be written to
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {shlex.quote(str(self.log))}\n{body}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    try:  # before root is played down
        packages.require(squashfs.PROGRAMS, "a test of images")
    except UserError as error:
        pytest.skip(str(error))
    made = Programs(tmp_path)
    monkeypatch.setenv("PATH", str(made.bin))
    for name in ("sh", "tar", "rm", "cat", "chmod", "mkdir", "cp", "sleep", "env", "mksquashfs", "unsquashfs"):
        if found := shutil.which(name, path="/usr/bin:/bin"):
            (made.bin / name).symlink_to(found)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return made


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "{}", "[{}]", "null", '[{"Architecture": "", "Config": 5}]'])
def test_an_answer_that_is_no_description_of_an_image_is_one_line(
    programs: Programs, tmp_path: Path, text: str
) -> None:
    for name, kind in {"docker": engines.Docker, "buildah": engines.Buildah}.items():
        programs.add(name, f"cat <<'END'\n{text}\nEND")
        with pytest.raises(UserError, match=rf"^`{name} .*inspect.* x` does not say how the image is configured: "):
            kind(tmp_path).config("x")


class TestChoice:
    def test_the_first_that_can_be_used(self, programs: Programs, tmp_path: Path) -> None:
        programs.add("docker", 'echo "Cannot connect to the Docker daemon" >&2; exit 1')
        programs.add("podman", "")
        programs.add("buildah", "")
        assert engines.choose(None, tmp_path).program == "podman"
        assert engines.choose("buildah", tmp_path).program == "buildah"

    def test_none(self, programs: Programs, tmp_path: Path) -> None:
        programs.add("docker", 'echo "permission denied while trying to connect to the daemon socket" >&2; exit 1')
        with pytest.raises(UserError) as error:
            engines.choose(None, tmp_path)
        assert str(error.value) == (
            "no engine to build an image with: docker: no permission to use its daemon (group docker, or root);"
            " podman: not installed; buildah: not installed"
        )

    def test_one_that_is_asked_for_and_cannot_be_used(self, programs: Programs, tmp_path: Path) -> None:
        programs.add("docker", "exit 1")
        programs.add("podman", "")
        with pytest.raises(UserError, match=r"^ENGINE=docker: docker: its daemon does not answer$"):
            engines.choose("docker", tmp_path)
        with pytest.raises(UserError, match=r"ENGINE='padman': unknown; .* \(did you mean 'podman'\?\)"):
            engines.choose("padman", tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("docker", "docker build --progress=plain --platform=linux/arm64"),
        (
            "podman",
            "podman build --format=docker --isolation=chroot --pull=missing --force-rm --volume=/c:/d:ro"
            " --platform=linux/arm64",
        ),
        (
            "buildah",
            "buildah bud --layers --format=docker --isolation=chroot --pull=missing --force-rm --volume=/c:/d:ro"
            " --platform=linux/arm64",
        ),
    ],
)
def test_what_an_engine_is_told(programs: Programs, tmp_path: Path, name: str, expected: str) -> None:
    programs.add(name, "echo STEP 1/1: FROM x")
    build = engine.Build(Path("/ctx"), Path("/ctx/Dockerfile"), "localhost/a:1", "aarch64", {"A": "b c"}, ["/c:/d:ro"])
    said: list[str] = []
    engines.choose(name, tmp_path).build(build, tmp_path / "log", Progress(said.append))
    assert programs.calls[-1] == f"{expected} --tag=localhost/a:1 --build-arg=A=b c --file=/ctx/Dockerfile /ctx"
    assert [line.split(": ", 2)[2] for line in said] == [f"{name} build 1/1 FROM x"]


class TestImport:
    @pytest.fixture(autouse=True)
    def podman(self, programs: Programs, tmp_path: Path) -> None:
        """Podman with one image, of a few files and a device."""
        files = tmp_path / "files"
        (files / "usr" / "bin").mkdir(parents=True)
        (files / "usr" / "bin" / "bash").write_bytes(b"\x7fELF\x02\x01" + bytes(12) + b"\x3e\x00" + bytes(100))
        with tarfile.open(tmp_path / "image.tar", "w") as tar:
            tar.add(files, ".")
            device = tarfile.TarInfo("./dev/null")
            device.type = tarfile.CHRTYPE
            tar.addfile(device)
        self.tar = tmp_path / "image.tar"
        self.inspected = tmp_path / "inspected"
        self.inspected.write_text(INSPECTED)
        programs.add(
            "podman",
            f"""case $1 in
image) cat {self.inspected} ;;
export) cat {self.tar} ;;
ps) cat {tmp_path}/containers 2>/dev/null ;;
esac""",
        )

    def made(self, tmp_path: Path, architecture: str = "x86_64") -> Path:
        podman = engines.choose("podman", tmp_path / "work")
        out = tmp_path / "out" / "a.sqsh"
        importing.to_file(podman, "localhost/a:1", out, architecture, tmp_path / "log", Progress(print))
        return out

    def left(self, tmp_path: Path) -> list[str]:
        directories = (tmp_path / "out", tmp_path / "work")
        return [path.name for directory in directories if directory.is_dir() for path in directory.iterdir()]

    def test_without_enroot(self, programs: Programs, tmp_path: Path) -> None:
        out = self.made(tmp_path)
        assert contents.read(str(out), "etc/environment") == b"A=b\n"
        assert contents.architecture(str(out)) == "x86_64"
        name = f"dsv4kit-reading-{os.getpid()}"
        assert [call for call in programs.calls if "create" in call or " rm" in call] == [
            f"podman create --name={name} localhost/a:1 /bin/true",
            f"podman rm {name}",
        ]
        assert sorted(self.left(tmp_path)) == ["a.sqsh", "a.sqsh.json", "a.sqsh.sha256"]

    def test_nothing_is_left_of_one_that_fails(self, programs: Programs, tmp_path: Path) -> None:
        self.tar.write_bytes(self.tar.read_bytes()[:2100])
        with pytest.raises(UserError, match="`podman export`: its files could not be unpacked"):
            self.made(tmp_path)
        assert programs.calls[-1] == f"podman rm dsv4kit-reading-{os.getpid()}"
        assert self.left(tmp_path) == []

    def test_what_the_engine_says_is_the_reason_and_stays_off_the_terminal(
        self, programs: Programs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        programs.add(
            "podman", f"case $1 in image) cat {self.inspected} ;; export) echo 'Error: no layer' >&2; exit 3 ;; esac"
        )
        with pytest.raises(UserError, match="its files could not be unpacked: Error: no layer"):
            self.made(tmp_path)
        assert "no layer" not in capfd.readouterr().err
        assert self.left(tmp_path) == []

    def test_an_image_that_does_not_fit_on_the_disk_is_one_line(self, programs: Programs, tmp_path: Path) -> None:
        programs.add("tar", "head -c 100 >/dev/null; echo 'tar: x: Cannot write: No space left on device' >&2; exit 2")
        programs.add("podman", f"case $1 in image) cat {self.inspected} ;; export) cat /dev/zero ;; esac")
        with pytest.raises(UserError, match="could not be unpacked: tar: x: Cannot write: No space left"):
            self.made(tmp_path)
        assert self.left(tmp_path) == []

    def test_an_image_for_another_processor_is_not_even_unpacked(self, programs: Programs, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="localhost/a:1: built for x86_64, aarch64 is needed"):
            self.made(tmp_path, "aarch64")
        assert not any("create" in call for call in programs.calls)
        assert self.left(tmp_path) == []

    def test_a_value_enroot_could_not_read_is_refused(self, tmp_path: Path) -> None:
        self.inspected.write_text(INSPECTED.replace("A=b", "A=b\\nc"))
        with pytest.raises(UserError, match="ENV A: its value has a line break"):
            self.made(tmp_path)
        assert self.left(tmp_path) == []

    def enroot(self, programs: Programs, tmp_path: Path, end: str) -> None:
        """enroot as it is: it leaves a container unless `docker rm` works, with podman too."""
        made = tmp_path / "made.sqsh"
        squashfs.write(tmp_path / "files", made)
        programs.add(
            "enroot",
            f"""[ "$ENROOT_SQUASH_OPTIONS" = "-comp zstd -Xcompression-level 3 -exit-on-error" ] || exit 9
[ -d "$ENROOT_TEMP_PATH" ] && [ "$2" = -o ] && [ "$4" = podman://localhost/a:1 ] && [ ! -e "$3" ] || exit 8
echo enroot.AbCd > {tmp_path}/containers
cat {made} > "$3"
{end}""",
        )

    def test_with_enroot(self, programs: Programs, tmp_path: Path) -> None:
        self.enroot(programs, tmp_path, f"docker rm enroot.AbCd && rm {tmp_path}/containers")
        out = self.made(tmp_path)
        assert json.loads(out.with_name("a.sqsh.json").read_text())["written_by"] == "enroot"
        assert "podman rm enroot.AbCd" in programs.calls
        assert not any("export" in call for call in programs.calls)
        assert sorted(self.left(tmp_path)) == ["a.sqsh", "a.sqsh.json", "a.sqsh.sha256"]

    @pytest.mark.parametrize("end", ["echo '[ERROR] mksquashfs failed' >&2; exit 1", 'echo half > "$3"'])
    def test_nothing_is_left_when_enroot_fails(self, programs: Programs, tmp_path: Path, end: str) -> None:
        self.enroot(programs, tmp_path, end)
        with pytest.raises(UserError, match=r"enroot import (failed: \[ERROR\] mksquashfs failed|wrote no whole)"):
            self.made(tmp_path)
        assert programs.calls[-1] == "podman rm enroot.AbCd"
        assert self.left(tmp_path) == []


@pytest.mark.parametrize(
    ("program", "said", "knows"),
    [
        ("buildah", "buildah version 1.23.1 (image-spec 1.0.1, runtime-spec 1.0.2-dev)", False),
        ("buildah", "buildah version 1.28.2 (image-spec 1.1.0-rc2, runtime-spec 1.0.2-dev)", True),
        ("podman", "podman version 3.4.4", False),
        ("podman", "podman version 4.3.1", True),
        ("docker", "Docker version 19.03.15, build 99e3ed8", False),
        ("docker", "Docker version 28.1.1, build 4eba377", True),
        ("docker", "who knows", False),
    ],
)
def test_an_engine_is_given_cache_mounts_from_the_version_that_knows_them(
    programs: Programs, tmp_path: Path, program: str, said: str, knows: bool
) -> None:
    programs.add(program, f"echo '{said}'")
    kind = {found.program: found for found in engines.ENGINES}[program]
    assert kind(tmp_path).knows_cache_mounts() is knows


def test_a_build_may_end_with_an_earlier_stage(programs: Programs, tmp_path: Path) -> None:
    programs.add("podman", "echo STEP 1/1: FROM x")
    build = engine.Build(Path("/ctx"), Path("/ctx/Dockerfile"), "localhost/a:1", os.uname().machine, target="wheels")
    engines.choose("podman", tmp_path).build(build, tmp_path / "log", Progress(print))
    assert "--force-rm --target=wheels --tag=localhost/a:1" in programs.calls[-1]


def test_of_a_killed_build_only_our_own_containers_are_removed_where_the_storage_is_everybodys(
    programs: Programs, tmp_path: Path
) -> None:
    programs.add("podman", "case $1 in ps) echo theirs dsv4kit-reading-1 ;; esac")
    assert engines.choose("podman", tmp_path).prepare() == ["dsv4kit-reading-1"]
    assert [call for call in programs.calls if " rm" in call] == ["podman rm dsv4kit-reading-1"]
