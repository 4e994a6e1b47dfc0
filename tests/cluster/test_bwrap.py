"""`container: bwrap` on a real Slurm: a chain inside a squashfs, and nothing of it left, however it ended."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_chain import Cluster, steps

from dsv4kit import packages
from dsv4kit.config.loading import load_site
from dsv4kit.config.site import Site
from dsv4kit.errors import UserError
from dsv4kit.image import squashfs
from dsv4kit.node.processes import descendants
from dsv4kit.run import ends, phases
from dsv4kit.sandbox.cluster import Sandbox
from dsv4kit.sandbox.runtime import runtime_python

ENTER = Path(__file__).parents[2] / "dsv4kit" / "node" / "enter_image.sh"
NEEDED = {"bwrap": "bubblewrap", "squashfuse": "squashfuse", **squashfs.PROGRAMS}
# What the tests show of the host, read-only; the image itself brings a skeleton, its configuration and a mark.
HOST = ["/usr:/usr:ro"]
NOBODY = 65534


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        packages.require(NEEDED, "the bwrap runtime and its tests")
    except UserError as error:
        pytest.skip(str(error))
    made = tmp_path_factory.mktemp("bwrap")
    for path in (made, *made.parents):  # pytest's own are for their owner alone, and one test is another user
        if path.stat().st_mode & 0o001:
            break
        path.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def image(root: Path) -> Path:
    """A squashfs with enroot's files; programs come from the host's /usr."""
    files = root / "rootfs"
    (files / "usr").mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (files / name).symlink_to(f"usr/{name}")
    (files / "etc").mkdir()
    (files / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    (files / "etc" / "group").write_text("root:x:0:\n")
    (files / "linked").symlink_to("/really/here")
    (files / "mark").write_text("from the image\n")
    env = [f"PATH={runtime_python().parent}:/usr/bin:/bin", "FROM_IMAGE=a b '$c'", "PYTHONPATH=/image/packages"]
    squashfs.prepare(files, squashfs.ImageConfig("x86_64", env), "a test")
    squashfs.write(files, root / "test.sqsh")
    return root / "test.sqsh"


def enter(image: Path, root: Path, *command: str, writable: str = "ro", mounts: tuple[str, ...] = ()) -> list[str]:
    empty = root / "empty"
    empty.mkdir(exist_ok=True)
    argv = ["bash", str(ENTER), str(image), str(empty), str(root / "scratch"), writable, "/"]
    return [*argv, *HOST, *mounts, "--", *command]


def said(argv: list[str], **env: str) -> str:
    done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def left(image: Path) -> list[str]:
    """What is still mounted, attached or running of an image."""
    # By source: an image that is being built meanwhile is mounted as well, somewhere below the kit's cache.
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    mounted = [line for line in mounts if line.partition(" - ")[2].split()[1] in ("dsv4kit", str(image))]
    loops = subprocess.run(["losetup", "--all"], capture_output=True, text=True).stdout.splitlines()
    running = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(image) in words:
            running.append(b" ".join(words).decode())
    return [*mounted, *(line for line in loops if str(image) in line), *running]


def wait_until_gone(image: Path) -> None:
    deadline = time.monotonic() + 20
    while found := left(image):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


class TestInside:
    def test_the_images_files_its_environment_and_the_mounts(self, image: Path, root: Path) -> None:
        (root / "data").mkdir()
        (root / "data" / "file").write_text("data\n")
        mounts = (f"{root}/data:/new/place:ro", f"{root}/data/file:/one-file", f"{root}/data:/linked/below")
        script = (
            "cat /mark; echo $FROM_IMAGE; echo $OF_THE_JOB; echo $PATH; cat /new/place/file /one-file"
            " /really/here/below/file; touch /new/place/x 2>/dev/null || echo read-only; touch /linked/below/x;"
            " touch /x 2>/dev/null || echo read-only; touch /tmp/x; stat -c %a /tmp; [ -c /dev/null ] && hostname"
        )
        lines = said(enter(image, root, "bash", "-c", script, mounts=mounts), OF_THE_JOB="kept").splitlines()
        assert lines[:3] == ["from the image", "a b '$c'", "kept"]
        assert lines[3] == f"{runtime_python().parent}:/usr/bin:/bin"
        assert lines[4:] == ["data"] * 3 + ["read-only"] * 2 + ["1777", os.uname().nodename]
        assert (root / "data" / "x").exists()
        assert left(image) == []

    def test_a_writable_image_forgets_what_was_written(self, image: Path, root: Path) -> None:
        script = "echo changed > /mark && mkdir /made && cat /mark"
        assert said(enter(image, root, "bash", "-c", script, writable="rw")) == "changed\n"
        assert said(enter(image, root, "bash", "-c", "cat /mark; ls /made 2>&1 | wc -w")).startswith("from the image")

    @pytest.mark.parametrize("way", ["fuse", "copy"])
    def test_a_user_without_rights_gets_the_same(self, image: Path, root: Path, way: str) -> None:
        """In a user namespace the kernel mounts no loop device: squashfuse serves the files, or a copy does."""
        for name in ("scratch", "out"):
            (root / name).mkdir(exist_ok=True)
            (root / name).chmod(0o777)
        device = root / "fuse"
        if not device.exists():
            os.mknod(device, 0o20666, os.makedev(10, 229 if way == "fuse" else 0))
        device.chmod(0o666)
        script = "id -u; cat /mark; whoami; touch here"
        inside = enter(image, root, "env", "-C", str(root / "out"), "bash", "-c", script, mounts=(f"{root}/out",))
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *inside]
        # Debian without udev has /dev/fuse for root alone.
        show = f'mount --bind {device if way == "fuse" else "/dev/null"} /dev/fuse; exec "$@"'
        argv = ["unshare", "--mount", "--propagation", "private", "bash", "-c", show, "bash", *user]
        assert said(argv, LOGNAME="somebody").split() == [str(NOBODY), "from", "the", "image", "somebody"]
        assert (root / "out" / "here").stat().st_uid == NOBODY
        (root / "out" / "here").unlink()
        copies = list(root.glob(f"scratch/dsv4kit-images-{NOBODY}/*/mark"))
        assert len(copies) == (way == "copy")
        wait_until_gone(image)

    def test_what_is_wrong_is_one_line_that_names_the_node(self, image: Path, root: Path) -> None:
        argv = enter(image, root, "true", mounts=("/not/there:/x",))
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 1
        assert (
            done.stderr
            == f"{os.uname().nodename}: image {image}: mount /not/there:/x: there is no /not/there on this node\n"
        )
        assert left(image) == []


class TestEnds:
    SCRIPT = "trap 'echo told; exit 3' TERM; echo up; sleep 1000 & wait"

    @pytest.fixture
    def running(self, image: Path, root: Path) -> Iterator[subprocess.Popen[str]]:
        argv = enter(image, root, "bash", "-c", self.SCRIPT)
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
            process.kill()

    def test_nothing_is_left_of_one_that_is_killed(self, running: subprocess.Popen[str], image: Path) -> None:
        assert left(image)
        running.kill()
        wait_until_gone(image)

    @pytest.mark.parametrize("whom", ["the first", "all"])
    def test_the_command_is_told_and_what_carries_it_waits(
        self, running: subprocess.Popen[str], image: Path, whom: str
    ) -> None:
        """Slurm signals the process it started, under proctrack/linuxproc every process of the step."""
        for pid in [running.pid, *(descendants(running.pid) if whom == "all" else [])]:
            os.kill(pid, signal.SIGTERM)
        assert running.stdout is not None
        assert running.stdout.read() == "told\n"
        assert running.wait(20) == 3
        wait_until_gone(image)

    def test_a_signal_at_the_very_end_does_not_hide_how_it_ended(self, image: Path, root: Path) -> None:
        """Bash's own `wait` says 255 in one of thirty such cases; four at a time, so that they come."""
        argv = enter(image, root, "bash", "-c", self.SCRIPT)

        def told(_: int) -> int:
            with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "up\n"
                for pid in [process.pid, *descendants(process.pid)]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                return process.wait(20)

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(told, range(60))) == {3}
        wait_until_gone(image)


@pytest.fixture(scope="module")
def cluster(sandbox: Sandbox, root: Path) -> Iterator[Cluster]:
    (root / "runs").mkdir()
    made = Cluster(sandbox, root / "runs", runtime_python())
    made.python = Path("python")  # the image's PATH leads to it
    sandbox.share([root])
    yield made
    made.slurm.run("scancel", "--me")


@pytest.fixture(scope="module")
def site(image: Path) -> Site:
    tree = load_site("sandbox").model_dump()
    python = runtime_python()
    environment, interpreter = python.parents[1], python.resolve().parents[1]
    others = {environment, Path("/etc/nsswitch.conf"), Path(__file__).parents[1] / "stand_in", interpreter} - {
        Path("/usr")
    }
    shown = [*HOST, *(f"{path}:{path}:ro" for path in others)]
    tree["container"] = {"runtime": "bwrap", "image": str(image), "mounts": shown}
    tree["python"] = "python"
    return Site.model_validate(tree)


def test_a_chain_runs_inside_the_image(cluster: Cluster, site: Site, image: Path) -> None:
    checked = '[ "$(cat /mark)" = \'from the image\' ] && [ "$FROM_IMAGE" = "a b \'\\$c\'" ]'
    site = site.model_copy(update={"setup": [f"{checked} && [ $(stat -c %m /tmp) = /tmp ]"]})
    run = cluster.submit("chain", ("recipe.module", "stand_in_sft"), ("schedule.steps", 4), recipe="sft", site=site)
    state = cluster.wait(run)
    assert (state.state, steps(state)) == ("finished", [(0, 2), (2, 4)])
    assert {segment.end for segment in state.segments} == {ends.COMPLETED}
    # The last batch script tells the removal only after all else.
    state = cluster.wait(run, lambda state: phases.CONTAINER_REMOVAL in state.segments[-1].seconds)
    for segment in state.segments:
        assert next(iter(segment.seconds)) == phases.CONTAINER_START
        assert list(segment.seconds)[-1] == phases.CONTAINER_REMOVAL
        assert all(seconds >= 0 for seconds in segment.seconds.values())
    wait_until_gone(image)


def test_a_run_that_is_cancelled_saves_its_verdict_and_leaves_nothing(
    cluster: Cluster, site: Site, image: Path
) -> None:
    slow = ("env.STAND_IN_STEP_S", "5")
    run = cluster.submit("cancelled", ("recipe.module", "stand_in_sft"), slow, recipe="sft", site=site)
    state = cluster.wait(run, lambda state: "import" in state.segments[0].seconds)
    assert left(image)
    cluster.slurm.cancel([segment.job_id for segment in reversed(state.segments)])
    state = cluster.wait(run)
    assert state.segments[0].end == ends.TERMINATED
    wait_until_gone(image)
