"""The sandbox as it really is: daemons, namespaces, power cuts, and nothing left behind."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4kit.cli import sandbox as cli
from dsv4kit.errors import UserError
from dsv4kit.sandbox import controller, processes
from dsv4kit.sandbox.cluster import Sandbox, SandboxSpec
from dsv4kit.sandbox.host import mount_points, poll
from dsv4kit.sandbox.spec import SandboxPaths

# Double fork and a session of its own, holding the step's output open: what a careless launcher leaves behind.
DETACH = "(setsid sleep {0} &); setsid bash -c 'sleep {0} & wait' & echo started"


def slurm(sandbox: Sandbox, *argv: str, timeout_s: float = 60) -> str:
    """Run one of Slurm's commands against the sandbox."""
    environment = {**os.environ, **sandbox.client_env}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=timeout_s, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def main(*argv: str) -> int:
    """The command line, as the kit's own main runs it."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(argv))


def node_processes(sandbox: Sandbox, node: str) -> str:
    return sandbox.exec(node, ["ps", "-eo", "stat,args"], capture=True).stdout


def slurm_state(sandbox: Sandbox, node: str) -> str:
    return controller.node_states(sandbox.layout).get(node, "unknown")


@pytest.fixture(scope="module")
def second(sandbox: Sandbox, sandbox_root: Path) -> Iterator[Sandbox]:
    """A second sandbox beside the first, with the tracker that loses detached processes."""
    yield Sandbox.up(SandboxSpec(name="second", nodes=1, gpus_per_node=0, proctrack="linuxproc"))
    assert Sandbox.take_down("second")


def test_every_node_is_a_machine_of_its_own(sandbox: Sandbox) -> None:
    script = "echo $(hostname) $(hostname -i) $(cat /etc/hostname); touch {/tmp,/dev/shm}/$(hostname); ls /tmp /dev/shm"
    before = set(os.listdir("/dev/shm"))
    with tempfile.NamedTemporaryFile(dir="/tmp", prefix="of-the-host-") as of_the_host:
        lines = slurm(sandbox, "srun", "-N4", "-l", "bash", "-c", script).splitlines()
    for i, node in enumerate(sandbox.node_names):
        said, *listed = [line.partition(": ")[2] for line in lines if line.startswith(f"{i}:")]
        assert said.split() == [node, sandbox.address(node), node]
        assert listed.count(node) == 2
        assert not set(listed) & {*sandbox.node_names, Path(of_the_host.name).name} - {node}
    assert set(os.listdir("/dev/shm")) == before


def test_a_job_sees_its_fake_gpu_as_cuda_alone(sandbox: Sandbox) -> None:
    environment = slurm(sandbox, "srun", "--gpus-per-node=1", "env")
    assert "CUDA_VISIBLE_DEVICES=0\n" in environment
    assert "ROCR_VISIBLE_DEVICES" not in environment
    assert "GPU_DEVICE_ORDINAL" not in environment
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        slurm(sandbox, "srun", "--gpus-per-node=2", "true")


def test_up_again_finds_it_as_it_is_and_a_larger_one_is_refused(sandbox: Sandbox) -> None:
    before = node_processes(sandbox, "node1")
    again = Sandbox.up(sandbox.spec)
    assert again.subnet == sandbox.subnet
    assert node_processes(sandbox, "node1")[:1] == before[:1]
    with pytest.raises(UserError, match="nodes = 4, not 5: `dsv4kit sandbox down --name"):
        Sandbox.up(SandboxSpec(name=sandbox.spec.name, nodes=5))


def test_a_shared_directory_is_seen_everywhere_and_after_a_power_cycle(sandbox: Sandbox) -> None:
    outside = Path(f"/tmp/dsv4kit sandbox test {os.getpid()}")
    link = outside.with_name(f"{outside.name} link")
    outside.mkdir()
    link.symlink_to(outside)
    try:
        assert sandbox.exec("node1", ["test", "-e", str(outside)]).returncode == 1
        (outside / "a").touch()
        sandbox.share([outside, link])
        sandbox.share([outside])
        for node in sandbox.node_names:
            assert sandbox.exec(node, ["touch", f"{outside}/{node}"]).returncode == 0
        assert sorted(os.listdir(outside)) == ["a", *sandbox.node_names]
        assert sandbox.exec("node2", ["ls", str(link)], capture=True).stdout.split()[0] == "a"
        # The directory is made anew on the host: the nodes must not go on with the old one.
        shutil.rmtree(outside)
        outside.mkdir()
        sandbox.share([outside])
        assert sandbox.exec("node2", ["touch", f"{outside}/new"]).returncode == 0
        assert os.listdir(outside) == ["new"]
        sandbox.kill_node("node3")
        sandbox.start_node("node3")
        assert sandbox.exec("node3", ["ls", str(outside)], capture=True).stdout == "new\n"
        with pytest.raises(UserError, match="cannot share /tmp itself"):
            sandbox.share([Path("/tmp")])
    finally:
        link.unlink()
        shutil.rmtree(outside)


@pytest.mark.parametrize("which", ["sandbox", "second"])
def test_detached_processes_end_with_their_job(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    cluster: Sandbox = request.getfixturevalue(which)
    assert slurm(cluster, "srun", "-w", "node1", "bash", "-c", DETACH.format(4321), timeout_s=20) == "started\n"
    cluster.share([tmp_path])
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{DETACH.format(4321)}\nsleep 4321\n")
    job = slurm(cluster, "sbatch", "--parsable", "-w", "node1", "-o", str(tmp_path / "log"), str(script)).strip()
    # Two detached sleeps, the shell around one, and the job's own sleep.
    assert poll(lambda: node_processes(cluster, "node1").count("sleep 4321") >= 4, 20)
    slurm(cluster, "scancel", job)
    assert poll(lambda: "sleep 4321" not in node_processes(cluster, "node1"), 20), node_processes(cluster, "node1")
    assert poll(lambda: slurm_state(cluster, "node1") == "idle", 10)


def test_pid_1_of_a_node_reaps_orphans(sandbox: Sandbox) -> None:
    assert sandbox.exec("node4", ["bash", "-c", "for i in {1..20}; do (sleep 0.05 & exec true); done"]).returncode == 0
    assert poll(lambda: "sleep 0.05" not in (seen := node_processes(sandbox, "node4")) and "Z" not in seen, 5)


def test_two_sandboxes_do_not_meet(sandbox: Sandbox, second: Sandbox) -> None:
    assert not sandbox.subnet.overlaps(second.subnet)
    assert slurm(second, "sinfo", "-h", "-N", "-o", "%N") == "node1\n"
    assert "GresTypes" not in second.slurm_conf.read_text()
    assert slurm(second, "srun", "hostname", "-i").strip() == second.address("node1")
    assert controller.listens(sandbox.address("node1"), 17818)
    reach = f"exec 3<>/dev/tcp/{sandbox.address('node1')}/17818"
    assert second.exec("node1", ["timeout", "2", "bash", "-c", reach], capture=True).returncode != 0
    # slurmctld answers on the sandbox's own address only.
    assert not controller.listens("127.0.0.1", 17817)


def test_power_cut_and_partition_are_noticed_and_mended(sandbox: Sandbox, tmp_path: Path) -> None:
    """The one test that waits until Slurm itself sees a node as down (25 to 35 s), for both faults at once."""
    log = tmp_path / "log"
    job = slurm(sandbox, "sbatch", "--parsable", "-w", "node2", "-o", str(log), "--wrap", "sleep 300").strip()
    assert poll(lambda: "sleep 300" in node_processes(sandbox, "node2"), 20)
    sandbox.kill_node("node2")
    sandbox.partition("node3")
    assert not controller.listens(sandbox.address("node2"), 17818)
    assert sandbox.exec("node3", ["ps", "-C", "slurmd"], capture=True).returncode == 0
    status = {node.name: (node.power, node.network) for node in sandbox.status().nodes}
    assert status == {"node1": ("on", "up"), "node2": ("off", "cut"), "node3": ("on", "cut"), "node4": ("on", "up")}
    with pytest.raises(UserError, match="node2 is powered off"):
        sandbox.exec("node2", ["true"])
    # A node that was switched off on purpose stays off.
    assert not Sandbox.up(sandbox.spec).node("node2").is_running
    assert poll(lambda: all("down" in slurm_state(sandbox, node) for node in ("node2", "node3")), 60, every_s=0.5)
    assert "JobState=PENDING" in slurm(sandbox, "scontrol", "show", "job", job)
    slurm(sandbox, "scancel", job)
    sandbox.start_node("node2")
    sandbox.partition("node3", up=True)
    assert controller.listens(sandbox.address("node3"), 17818)
    assert slurm_state(sandbox, "node2") == "idle"
    assert poll(lambda: slurm_state(sandbox, "node3") == "idle", 10)
    assert sorted(slurm(sandbox, "srun", "-w", "node2,node3", "-N2", "hostname").split()) == ["node2", "node3"]


def test_command_line(sandbox: Sandbox, capfd: pytest.CaptureFixture[str]) -> None:
    name = ["--name", sandbox.spec.name]
    assert main("exec", *name, "node2", "--", "bash", "-c", "hostname; exit 7") == 7
    assert main("exec", *name, "node2", "--", "bash", "-c", "kill -KILL $$") == 137
    assert capfd.readouterr().out == "node2\n"
    deadline = time.monotonic() + 120
    while True:
        assert main("status", "--json", *name) == 0
        states = [node["slurm"] for node in json.loads(capfd.readouterr().out)["nodes"]]
        if states == ["idle"] * 4:
            break
        assert set(states) <= {"idle", "completing"}, "a job of another test may still be ending, no more"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    with pytest.raises(UserError, match=r"no node 'nod2'; it has node1, .*did you mean 'node2'"):
        main("exec", *name, "nod2", "--", "true")
    with pytest.raises(UserError, match="'nothing' is not up"):
        main("status", "--name", "nothing")
    assert main("down", "--name", "nothing") == 0
    assert capfd.readouterr().out == "sandbox nothing: nothing to take down\n"


def traces(layout: SandboxPaths) -> list[str]:
    """Everything on this machine that belongs to one sandbox."""
    found = [f"process {process}" for process in processes.find(layout)]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{layout.state_dir}/".encode() in path.read_bytes():
                found.append(f"command {path}")
        except OSError:
            continue
    places = [Path("/sys/class/net"), Path("/run/netns"), Path("/sys/fs/cgroup/freezer")]
    found += [str(entry) for place in places if place.is_dir() for entry in place.iterdir() if layout.tag in entry.name]
    return found + [mount for mount in mount_points() if layout.tag in mount or str(layout.state_dir) in mount]


def start_up(spec: SandboxSpec) -> subprocess.Popen[bytes]:
    code = f"from dsv4kit.sandbox.cluster import *; Sandbox.up(SandboxSpec(name={spec.name!r}, nodes={spec.nodes}))"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def test_crashes_are_cleared_up_and_down_leaves_nothing(sandbox_root: Path) -> None:
    spec = SandboxSpec(name="crash", nodes=2)
    layout = spec.layout
    general = [set(os.listdir("/sys/class/net")), mount_points(), set(os.listdir("/sys/fs/cgroup/freezer"))]
    moments = [
        lambda: bool(processes.find(layout, controller.MUNGED)),
        lambda: Path(f"/run/netns/{layout.tag}-node1").exists(),
        lambda: bool(processes.find(layout, "node2")),
    ]
    for moment in moments:
        child = start_up(spec)
        assert poll(moment, 20, every_s=0.001)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert traces(layout)
    sandbox = Sandbox.up(spec)
    first = int(slurm(sandbox, "srun", "-N2", "-n1", "printenv", "SLURM_JOB_ID"))
    for role in (controller.SLURMCTLD, controller.MUNGED):
        processes.kill_all(layout, role)
    assert sandbox.status().state == "broken"
    sandbox = Sandbox.up(spec)
    # A node that died by itself is brought back.
    processes.kill_all(layout, "node2")
    assert Sandbox.up(spec).node("node2").is_running
    slurm(sandbox, "sbatch", "-N2", "-o", "/dev/null", "--wrap", "sleep 500")
    sandbox.down()
    assert traces(layout) == []
    sandbox = Sandbox.up(spec)
    assert int(slurm(sandbox, "srun", "-N2", "-n1", "printenv", "SLURM_JOB_ID")) > first + 1
    assert "sleep 500" not in node_processes(sandbox, "node1")
    sandbox.down(wipe=True)
    assert traces(layout) == []
    assert not layout.state_dir.exists()
    assert not Sandbox.take_down("crash")
    after = [set(os.listdir("/sys/class/net")), mount_points(), set(os.listdir("/sys/fs/cgroup/freezer"))]
    assert [new - old for new, old in zip(after, general, strict=True)] == [set(), set(), set()]
