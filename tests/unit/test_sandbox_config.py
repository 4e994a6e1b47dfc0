"""The sandbox's configuration files, and the checks of what a user may ask for."""

from __future__ import annotations

import re
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from dsv4kit.errors import UserError
from dsv4kit.sandbox.config import Facts, parse_version, render
from dsv4kit.sandbox.network import RANGES, choose_subnet
from dsv4kit.sandbox.spec import ROOT_VARIABLE, Proctrack, SandboxPaths, SandboxSpec

SUBNET = IPv4Network("10.77.5.0/24")


def files(proctrack: Proctrack = "cgroup", version: tuple[int, int] = (22, 5), **spec: int) -> dict[str, str]:
    return render(SandboxSpec(**spec, root=Path("/r")), Facts(SUBNET, proctrack, version))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "Big"}, "sandbox name 'Big'"),
        ({"name": "a/b"}, "sandbox name 'a/b'"),
        ({"name": ""}, "sandbox name ''"),
        ({"name": "x" * 25}, "1 to 24"),
        ({"nodes": 0}, "nodes = 0 is not between 1 and 64"),
        ({"nodes": 65}, "nodes = 65"),
        ({"gpus_per_node": -1}, "gpus_per_node = -1 is not between 0 and 16"),
        ({"cpus_per_node": 0}, "cpus_per_node = 0"),
        ({"memory_mb": 5}, "memory_mb = 5 is less than 64"),
    ],
)
def test_a_bad_value_is_named_in_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        SandboxSpec(**values)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("root", ["relative", "/with blank", "/a/../b", "/#comment", "/comma,"])
def test_a_root_that_slurm_conf_cannot_hold_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, root)
    with pytest.raises(UserError, match=ROOT_VARIABLE):
        _ = SandboxSpec().layout


def test_a_root_too_long_for_a_socket_is_refused_with_the_excess() -> None:
    room = 107 - len("/a/run/munge.sock") - 1
    assert len(str(SandboxPaths("a", Path("/" + "x" * room)).munge_socket)) == 107
    with pytest.raises(UserError, match="3 bytes too long"):
        SandboxPaths("a", Path("/" + "x" * (room + 3)))


def test_names_are_short_and_differ_by_root_and_name() -> None:
    layouts = [SandboxPaths(name, Path(root)) for name in ("default", "x" * 24) for root in ("/a", "/b")]
    tags = {layout.tag for layout in layouts}
    assert len(tags) == 4
    assert all(len(tag) <= 15 for tag in tags)


def test_the_subnet_avoids_every_route() -> None:
    assert choose_subnet([]) == IPv4Network("10.77.0.0/24")
    used = ["0.0.0.0/0", "10.77.0.0/23", "10.77.2.254/32", "192.168.0.0/16"]
    assert choose_subnet(map(IPv4Network, used)) == IPv4Network("10.77.3.0/24")
    assert choose_subnet([IPv4Network("10.0.0.0/8")]) == IPv4Network("198.18.0.0/24")
    with pytest.raises(UserError, match="no free /24"):
        choose_subnet(RANGES)


def test_slurm_conf_has_a_line_per_node_and_short_lines() -> None:
    conf = files(nodes=3, gpus_per_node=2, cpus_per_node=16, memory_mb=2048)["slurm.conf"]
    nodes = [line for line in conf.splitlines() if line.startswith("NodeName=")]
    assert nodes[2] == "NodeName=node3 NodeAddr=10.77.5.3 CPUs=16 RealMemory=2048 Gres=gpu:2 State=UNKNOWN"
    assert len(nodes) == 3
    assert "SlurmctldHost=controller(10.77.5.254)" in conf
    # Slurm refuses lines over 1024 characters, and a blank in a value would end it.
    assert all(re.fullmatch(r"#.*|(\S+=\S+ ?)*", line) and len(line) < 1024 for line in conf.splitlines())


def test_no_gpus_means_no_gres_anywhere() -> None:
    without = files(gpus_per_node=0)
    assert "gres" not in without["slurm.conf"].lower()
    assert without["gres.conf"] == ""


@pytest.mark.parametrize(("gpus", "devices"), [(1, "gpu0"), (8, "gpu[0-7]")])
def test_gres_conf_names_one_device_per_gpu(gpus: int, devices: str) -> None:
    assert files(gpus_per_node=gpus)["gres.conf"].endswith(f"File=/r/default/dev/{devices}\n")


def test_linuxproc_gets_the_task_epilog_and_no_systemd() -> None:
    assert "TaskEpilog" not in files("cgroup")["slurm.conf"]
    old, new = files("linuxproc", (22, 5)), files("linuxproc", (24, 11))
    assert "ProctrackType=proctrack/linuxproc" in old["slurm.conf"]
    assert "TaskEpilog=/r/default/bin/epilog.sh" in old["slurm.conf"]
    assert "CgroupPlugin=cgroup/v1" in old["cgroup.conf"]
    assert "CgroupPlugin=disabled" in new["cgroup.conf"]


def test_hosts_has_every_node_and_the_controller() -> None:
    hosts = files(nodes=2)["hosts"].splitlines()
    assert hosts[2:] == ["10.77.5.254 controller", "10.77.5.1 node1", "10.77.5.2 node2"]


@pytest.mark.parametrize(
    ("text", "version"), [("slurm-wlm 22.05.8\n", (22, 5)), ("slurm 24.11.5", (24, 11)), ("", (0, 0))]
)
def test_parse_version(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version
