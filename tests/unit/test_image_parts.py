"""Parts of building an image that need no engine: enroot's files, records, settings of the host, progress, refusals."""

from __future__ import annotations

import json
import os
import platform
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dsv4kit import packages
from dsv4kit.config.loading import hardware_of, load_settings
from dsv4kit.errors import UserError
from dsv4kit.feasibility import image_rules
from dsv4kit.feasibility.case import ImageFacts
from dsv4kit.image import base, building, contents, host_settings, importing, progress, record, space, squashfs
from dsv4kit.image.manifest import FORMAT
from dsv4kit.image.progress import Progress, reason, run_logged, step_of
from dsv4kit.image.stack import stack_for

CONFIG = squashfs.ImageConfig(
    architecture="x86_64",
    env=("PATH=/opt/venv/bin:/usr/bin:/bin", 'TEXT=it\'s "$HOME" `id`', "ENROOT_ROOTFS_WRITABLE=y"),
    labels={"git.verl": "0bd668c\nexec rm -rf /"},
)


class TestEnrootsFiles:
    def run(self, tmp_path: Path, config: squashfs.ImageConfig, *command: str) -> str:
        script = tmp_path / "rc"
        script.write_text(squashfs.rc(config, "localhost/x:1").replace("/etc/rc.local", str(tmp_path / "rc.local")))
        done = subprocess.run(["/bin/sh", script, *command], capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def test_rc_runs_the_command_in_the_working_directory(self, tmp_path: Path) -> None:
        directory = tmp_path / "it's here"
        config = squashfs.ImageConfig("x86_64", working_dir=str(directory))
        assert self.run(tmp_path, config, "pwd") == str(directory)

    def test_rc_puts_the_entrypoint_before_the_command(self, tmp_path: Path) -> None:
        config = squashfs.ImageConfig("x86_64", entrypoint=("printf", "%s,"), command=("a b", "$c"))
        assert self.run(tmp_path, config, "x y", "z") == "x y,z,"
        assert self.run(tmp_path, config) == "a b,$c,"

    def test_rc_sources_the_sites_hooks(self, tmp_path: Path) -> None:
        (tmp_path / "rc.local").write_text("export FROM_HOOK=yes\n")
        assert self.run(tmp_path, CONFIG, "sh", "-c", "echo $FROM_HOOK") == "yes"

    def test_labels_stay_comments(self) -> None:
        assert "# git.verl 0bd668c exec rm -rf /\n" in squashfs.rc(CONFIG, "x")

    def test_the_environment_is_word_for_word_but_for_enroots_own(self) -> None:
        assert squashfs.environment(CONFIG.env) == "".join(f"{entry}\n" for entry in CONFIG.env[:2])

    def test_a_login_shell_keeps_the_images_path(self) -> None:
        text = squashfs.login_path(CONFIG.env) + "echo $PATH"
        done = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True)
        assert done.stdout.strip() == "/opt/venv/bin:/usr/bin:/bin"

    def test_a_value_with_a_line_break_is_refused(self) -> None:
        with pytest.raises(UserError, match="ENV NOTE: its value has a line break"):
            squashfs.environment(["NOTE=a\nb"])

    def test_links_of_an_image_lead_nowhere_outside(self, tmp_path: Path) -> None:
        outside, root = tmp_path / "outside", tmp_path / "root"
        outside.mkdir()
        root.mkdir()
        (root / "etc").symlink_to(outside)
        (root / "up").symlink_to("../../..")
        (root / "round").symlink_to("round")
        assert squashfs.inside(root, "etc/rc") == root / str(outside).lstrip("/") / "rc"
        assert squashfs.inside(root, "/up/x") == root / "x"
        with pytest.raises(UserError, match="in a circle"):
            squashfs.inside(root, "round/x")
        (root / str(outside).lstrip("/")).mkdir(parents=True)
        squashfs.prepare(root, CONFIG, "x")
        assert list(outside.iterdir()) == []


class TestRecord:
    def put(self, tmp_path: Path, text: str = "an image") -> Path:
        temporary = tmp_path / ".part"
        temporary.write_text(text)
        record.put(temporary, tmp_path / "a.sqsh", source="s", architecture="x86_64", written_by="w", stack_hash="1234")
        return tmp_path / "a.sqsh"

    def test_it_is_beside_the_file_and_checked_with_the_usual_tool(self, tmp_path: Path) -> None:
        found = record.load(self.put(tmp_path))
        assert found is not None
        assert (found.stack_hash, found.size_bytes) == ("1234", 8)
        subprocess.run(["sha256sum", "--check", "--quiet", "a.sqsh.sha256"], cwd=tmp_path, check=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.sqsh", "a.sqsh.json", "a.sqsh.sha256"]

    @pytest.mark.parametrize(
        "damage", [{"sha256": None}, {"manifest": 5}, {"manifest": {"git": []}}, {"stack_hash": 7}, {"more": 1}]
    )
    def test_a_damaged_record_is_none(self, tmp_path: Path, damage: dict[str, Any]) -> None:
        image = self.put(tmp_path)
        content = json.loads(record.beside(image).read_text())
        record.beside(image).write_text(json.dumps({**content, **damage}))
        assert record.load(image) is None

    def test_a_file_that_was_changed_since_has_none(self, tmp_path: Path) -> None:
        image = self.put(tmp_path)
        os.utime(image, (1, 1))
        assert record.load(image) is None

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"source": 1}'])
    def test_a_damaged_one_is_none(self, tmp_path: Path, text: str) -> None:
        image = self.put(tmp_path)
        record.beside(image).write_text(text)
        assert record.load(image) is None


class TestProgress:
    @pytest.mark.parametrize(
        ("line", "step"),
        [
            ("STEP 3/14: RUN set -eu;     pip install x", "3/14 RUN set -eu; pip install x"),
            ("[1/2] STEP 3/14: FROM x", "3/14 FROM x"),
            ("#9 [packages 2/3] RUN true", "2/3 RUN true"),
            ("#5 [2/7] COPY a b", "2/7 COPY a b"),
            ("#5 DONE 0.1s", None),
            ("Collecting x", None),
        ],
    )
    def test_steps_of_all_engines(self, line: str, step: str | None) -> None:
        assert step_of(line) == step

    def test_long_steps_are_cut(self) -> None:
        assert len(str(step_of(f"STEP 1/2: RUN {'x' * 500}"))) < 100

    @pytest.mark.parametrize(
        ("lines", "said"),
        [
            (
                ["E: Unable to locate package x", "error building at STEP", "exit status 1"],
                "E: Unable to locate package x",
            ),
            (["a", "", "no space left on device", "the end"], "the end"),
            (
                ["ERROR: No matching distribution found for x", "Error: exit status 1"],
                "ERROR: No matching distribution found for x",
            ),
            ([], "no message"),
        ],
    )
    def test_the_line_that_says_why(self, lines: list[str], said: str) -> None:
        assert reason(lines) == said

    def test_a_failure_names_the_step_and_the_log(self, tmp_path: Path) -> None:
        script = "echo 'STEP 2/3: RUN x'; echo 'fatal: cannot do it'; exit 7"
        said: list[str] = []
        with pytest.raises(UserError, match=r"build failed at step 2/3 RUN x: fatal: cannot do it \(all.*log\)"):
            run_logged(["sh", "-c", script], tmp_path / "log", Progress(said.append), os.environ, "build")
        assert said == ["image: 0 s: build 2/3 RUN x"]
        assert (tmp_path / "log").read_text() == "STEP 2/3: RUN x\nfatal: cannot do it\n"

    def test_silence_is_broken(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        writers: list[threading.Thread] = []

        def told(line: str) -> None:
            if "still at it" in line and not writers:
                writers.append(threading.Thread(target=(tmp_path / "pipe").write_text, args=("x\n",)))
                writers[0].start()

        argv = ["sh", "-c", 'read _ < "$0"', str(tmp_path / "pipe")]
        run_logged(argv, tmp_path / "log", Progress(told), os.environ, "build", silence_s=0.01)
        writers[0].join(10)

    def test_an_interruption_ends_the_program(self, tmp_path: Path) -> None:
        def interrupted(line: str) -> None:
            raise KeyboardInterrupt

        argv = ["sh", "-c", f"echo $$ > {tmp_path}/pid; echo 'STEP 1/1: x'; exec sleep 1000"]
        with pytest.raises(KeyboardInterrupt):
            run_logged(argv, tmp_path / "log", Progress(interrupted), os.environ, "build")
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    @pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (125, "2 min 5 s")])
    def test_durations(self, seconds: float, text: str) -> None:
        assert progress.duration(seconds) == text


class TestHost:
    LISTING = (
        ":env:.cert='/of/env.crt'\n:env:.default-timeout='180'\nglobal.cert='/of/file.crt'\n"
        "global.index-url='https://me:secret@host.invalid/simple'\ninstall.no-binary='x'\n"
        "global.extra-index-url='file:///a b'\n"
    )

    def test_pips_settings_with_variables_over_files(self) -> None:
        assert host_settings.pip_settings(self.LISTING) == {
            "cert": "/of/env.crt",
            "timeout": "180",
            "index-url": "https://me:secret@host.invalid/simple",
            "extra-index-url": "file:///a b",
        }

    def test_what_is_on_this_disk_is_shown_to_the_build(self, tmp_path: Path) -> None:
        for name in ("index/simple", "wheels"):
            (tmp_path / name).mkdir(parents=True)
        settings = {
            "extra-index-url": f"file://{tmp_path}/index/simple https://else/simple",
            "find-links": f"{tmp_path}/wheels /not/there",
        }
        # An index's pages link to files beside it.
        assert host_settings.local_paths(settings) == [f"{tmp_path}/index", f"{tmp_path}/wheels"]

    def test_certificates_and_an_index_with_a_password(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        authority = tmp_path / "ca.crt"
        authority.write_text("x")
        settings = {"index-url": "https://me:secret@host.invalid/simple"}
        monkeypatch.setattr(host_settings, "pip_settings", lambda: dict(settings))
        mounts = host_settings.mounts(tmp_path / "h", {"SSL_CERT_FILE": str(authority)})
        assert [mount.split(":")[1] for mount in mounts] == ["/run/dsv4kit-ca.crt", "/etc/gitconfig", "/etc/pip.conf"]
        pip = tmp_path / "h" / "pip.conf"
        assert stat.S_IMODE(pip.stat().st_mode) == 0o600
        shown = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            env={"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": str(pip), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert "index-url='https://me:secret@host.invalid/simple'" in shown.stdout
        assert "cert='/run/dsv4kit-ca.crt'" in shown.stdout

    def test_a_machine_without_such_settings_shows_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host_settings, "pip_settings", dict)
        assert host_settings.mounts(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("sources", "mirror"),
    [
        ("Types: deb\nURIs: http://mirror.example/debian/\nSuites: x\n", "http://mirror.example/debian"),
        ("deb [signed-by=/k] https://m.example/debian bookworm main\n", "https://m.example/debian"),
        ("deb http://m.example/debian-security x main\ndeb http://m.example/debian x main", "http://m.example/debian"),
        ("deb http://archive.example/ubuntu noble main\n", "http://deb.debian.org/debian"),
        ("", "http://deb.debian.org/debian"),
    ],
)
def test_the_mirror_is_the_machines_own(sources: str, mirror: str) -> None:
    assert base.mirror(sources) == mirror


def test_only_debians_images_can_be_made_here() -> None:
    assert base.suite_of("debian:bookworm-slim") == "bookworm"
    assert base.suite_of("docker.io/library/debian:trixie@sha256:abc") == "trixie"
    assert base.suite_of("nvidia/cuda:13.0.2-devel-ubuntu24.04") is None
    assert base.local_name("debian:bookworm-slim", "aarch64") == "localhost/dsv4kit-base:bookworm-arm64"


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("debian:bookworm-slim", "docker.io/library/debian:bookworm-slim"),
        ("nvidia/cuda@sha256:a", "docker.io/nvidia/cuda@sha256:a"),
        ("nvcr.io/nvidia/pytorch:26.04-py3", "nvcr.io/nvidia/pytorch:26.04-py3"),
        ("localhost/mine:1", "localhost/mine:1"),
        ("host:5000/x", "host:5000/x"),
    ],
)
def test_a_name_without_a_registry_is_the_hubs(name: str, full: str) -> None:
    assert base.qualified(name) == full


def test_a_file_that_could_not_be_written_is_refused_first(tmp_path: Path) -> None:
    importing.check_writable(tmp_path / "new" / "x.sqsh")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"IMAGE='.*/file/x.sqsh': .*/file cannot be written to"):
        importing.check_writable(tmp_path / "file" / "x.sqsh")


def test_room_is_asked_for_before_anything_begins(tmp_path: Path) -> None:
    space.require({tmp_path: 0.000001})
    with pytest.raises(UserError, match=rf"{tmp_path} and {tmp_path}: 10000000 GB are needed, [0-9.]+ GB are free"):
        space.require({tmp_path / "a" / "b": 4e6, tmp_path / "c": 6e6})


def test_another_processor_needs_emulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_BINFMT", tmp_path)
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    building.check_processor(platform.machine())
    with pytest.raises(
        UserError, match=f"this machine is {platform.machine()}, the image is for {other}, and there is no"
    ):
        building.check_processor(other)
    (tmp_path / f"qemu-{other}").write_text("enabled\ninterpreter /usr/bin/qemu\n")
    building.check_processor(other)


class TestFit:
    SETTINGS = load_settings("gb200", "dsv4-pro", "grpo").settings

    def problems(self, **changes: Any) -> list[str]:
        manifest = {
            "format": FORMAT,
            "hardware": "gb200",
            "features": {"verl": self.SETTINGS.engine.verl},
            "profiles": [self.SETTINGS.profile],
            **changes,
        }
        return [r.why for r in image_rules.refused(ImageFacts("x.sqsh", None, manifest, FORMAT), self.SETTINGS)]

    def test_one_that_fits(self) -> None:
        assert self.problems() == []

    def test_kernels_for_another_gpu(self) -> None:
        assert "built for HW=h100, whose kernels gb200 does not run" in self.problems(hardware="h100")[0]
        assert "built for HW=gb300" in self.problems(hardware="gb300")[0]
        assert "built for HW=mine" in self.problems(hardware="mine")[0]

    def test_another_verl(self) -> None:
        found = self.problems(features={"verl": "main-2026-10"})
        assert found == [
            'its verl is main-2026-10, the run is set up for 0.9.1; SET="engine.verl=main-2026-10" goes with it'
        ]
        assert self.SETTINGS.engine.verl == "0.9.1"

    def test_another_recipe(self) -> None:
        wrong = self.problems(profiles=["flash-sft-gb200"])[0]
        assert wrong.endswith("it was built for flash-sft-gb200, and not for pro-grpo-gb200")

    def test_a_manifest_of_another_kit(self) -> None:
        assert len(self.problems(format=FORMAT + 1)) == 1

    def test_the_same_kernels_under_another_name(self) -> None:
        settings = load_settings("h200", "dsv4-pro", "grpo").settings
        manifest = {"format": FORMAT, "hardware": "h100", "features": {"verl": settings.engine.verl}, "profiles": []}
        assert not list(image_rules.refused(ImageFacts("x.sqsh", None, manifest, FORMAT), settings))


def test_a_damaged_image_is_one_line_and_not_an_image_without_a_manifest(tmp_path: Path) -> None:
    packages.require(squashfs.PROGRAMS, "this test")
    (tmp_path / "file").write_text("x")
    image = tmp_path / "x.sqsh"
    subprocess.run(["mksquashfs", tmp_path / "file", image, "-quiet", "-no-progress"], check=True)
    assert contents.manifest(str(image)) is None
    content = image.read_bytes()
    image.write_bytes(content[:96] + b"\xff" * (len(content) - 96))
    with pytest.raises(UserError, match=r"/x.sqsh: damaged, copy it again: .*FATAL"):
        contents.manifest(str(image))


@pytest.mark.parametrize("content", ["[]", '{"features": 5}', '{"packages": []}', '{"hardware": ["x"]}', "[" * 100000])
def test_a_damaged_manifest_is_one_line(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(contents, "read", lambda image, path: content.encode())
    with pytest.raises(UserError, match=r"/x.sqsh: /opt/dsv4kit/manifest.json in it is damaged"):
        contents.manifest("/x.sqsh")


class TestMake:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DSV4KIT_CACHE", str(tmp_path / "cache"))

        def choose(name: str | None, directory: Path) -> None:
            raise UserError("an engine was asked for")

        monkeypatch.setattr(building, "choose", choose)

    def make(self, out: Path | None = None) -> building.Built:
        return building.make(building.BuildRequest("cpu", out=out), Progress(print))

    def test_one_that_is_there_is_used_again_without_any_engine(self, tmp_path: Path) -> None:
        variables = {"BASE_IMAGE": base.local_name("debian:bookworm", platform.machine())}
        with building.context_of(stack_for("cpu"), hardware_of("cpu"), variables) as context:
            out = building.default_path(context)
        (tmp_path / "part").write_text("image")
        known = {"source": "s", "architecture": platform.machine(), "written_by": "w"}
        record.put(tmp_path / "part", out, stack_hash=context.stack_hash, **known)
        assert self.make() == building.Built(out, record.load(out), reused=True)
        (tmp_path / "other.sqsh").write_text("other")
        with pytest.raises(UserError, match="exists already and has something else inside"):
            self.make(tmp_path / "other.sqsh")
        assert (tmp_path / "other.sqsh").read_text() == "other"

    def test_what_fails_leaves_no_context_and_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="an engine was asked for"):
            self.make(tmp_path / "out" / "x.sqsh")
        assert [path.name for path in (tmp_path / "cache" / "images").iterdir()] == ["lock"]
        assert not (tmp_path / "out").exists()
