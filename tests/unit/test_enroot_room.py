"""Room for enroot's containers on a node: what the script sees there, and what the doctor makes of it."""

import os
import subprocess
from pathlib import Path

import pytest

from dsv4kit.launch.enroot_room import HostLook, Place, findings, parse

SCRIPT = Path(__file__).parents[2] / "dsv4kit" / "node" / "enroot_host.sh"
GB = 10**9


class Host:
    """A node with an enroot of its own and a queue of jobs."""

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, root / "data"
        self.etc = root / "etc" / "enroot"
        (self.etc / "enroot.conf.d").mkdir(parents=True)
        self.data.mkdir()
        (root / "bin").mkdir()
        self.program("enroot", f'config::export ENROOT_SYSCONF_PATH "{self.etc}"\n[ "$1" != remove ] || exit 1\n')
        self.program("squeue", "printf '%s\\n' 9\n")
        self.program("scontrol", f"echo 'PlugStackConfig         = {root}/plugstack.conf'\n")
        (self.etc / "enroot.conf").write_text("#ENROOT_DATA_PATH /not/this\nENROOT_TEMP_PATH /tmp\n")
        (self.etc / "enroot.conf.d" / "local.conf").write_text(f"ENROOT_DATA_PATH {root}/data/$(id -u)\n")

    def program(self, name: str, body: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}")
        path.chmod(0o755)

    def run(self, *words: str) -> str:
        env = {"PATH": f"{self.root / 'bin'}:/usr/bin:/bin", "HOME": str(self.root), "SLURMD_NODENAME": "n1"}
        done = subprocess.run(["bash", SCRIPT, *words], env=env, capture_output=True, text=True)
        assert done.stderr == ""
        return done.stdout

    def look(self) -> HostLook:
        (self.root / "out").mkdir(exist_ok=True)
        self.run("look", str(self.root / "out"))
        return parse("n1", (self.root / "out" / "n1").read_text())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_administrators_configuration_says_where_containers_go(host: Host) -> None:
    look = host.look()
    assert look.places["data"].path == f"{host.data}/{os.getuid()}"
    assert (look.places["data"].free > 0, look.places["data"].writable) == (True, True)
    assert look.places["cache"].path == f"{host.root}/.cache/enroot"
    assert (look.squashfuse, look.left) == (False, ())


def test_without_a_word_enroot_keeps_them_in_the_home(host: Host) -> None:
    (host.etc / "enroot.conf.d" / "local.conf").unlink()
    assert host.look().places["data"].path == f"{host.root}/.local/share/enroot"


def test_use_squashfuse_is_read_where_slurm_says_its_plugins_are_named(host: Host) -> None:
    (host.root / "plugstack.conf").write_text("required spank_pyxis.so runtime_path=/run/pyxis use_squashfuse=1\n")
    assert host.look().squashfuse


def test_containers_of_jobs_that_are_over_are_named_and_removed_by_their_job(host: Host) -> None:
    mine = host.data / str(os.getuid())
    for name in ("pyxis_7.0", "pyxis_8.0", "pyxis_9.0", "pyxis_mine", "other"):
        (mine / name / "etc").mkdir(parents=True)
    assert host.look().left == (f"{mine}/pyxis_7.0", f"{mine}/pyxis_8.0")
    assert host.run("clean", "7", "70") == f"n1: removed {mine}/pyxis_7.0: left by job 7, which is over\n"
    assert sorted(os.listdir(mine)) == ["other", "pyxis_8.0", "pyxis_9.0", "pyxis_mine"]


def looked(kind: str = "xfs", free: int = 100 * GB, **more: object) -> HostLook:
    return HostLook("n1", "/usr/bin/enroot", {"data": Place("/d", kind, free, True)}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("look", "well", "said"),
    [
        (looked(), True, "100 GB free; the image takes 40 GB of it"),
        (looked("tmpfs"), True, "40 GB of it, in memory"),
        (looked(free=30 * GB), False, "the image has 40 GB unpacked and would not start"),
        (looked("nfs"), False, "ENROOT_DATA_PATH has to be local"),
        (looked(free=30 * GB, squashfuse=True), True, "nothing is unpacked"),
        (HostLook("n1", ""), True, "could not be seen"),
        (HostLook("n1", "", {"data": Place("/d", "xfs", 9, False)}), False, "cannot be made or written to"),
    ],
)
def test_what_the_doctor_makes_of_it(look: HostLook, well: bool, said: str) -> None:
    found = list(findings(look, 40 * GB))
    assert all(fine for fine, _ in found) == well
    assert any(said in text for _, text in found)


def test_what_is_left_is_said_with_what_removes_it() -> None:
    assert list(findings(looked(left=("/d/pyxis_7.0",)), None))[-1] == (
        False,
        "n1: /d/pyxis_7.0 is left by a job that is over; `enroot remove -f pyxis_7.0`",
    )
