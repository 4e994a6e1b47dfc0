"""Parts of the sandbox that need no cluster: processes, shares, packages, the command line."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4kit.cli import sandbox as cli
from dsv4kit.errors import UserError
from dsv4kit.sandbox import host, packages, processes, shares
from dsv4kit.sandbox.cluster import Sandbox
from dsv4kit.sandbox.spec import SandboxPaths, SandboxSpec
from dsv4kit.sandbox.state import make_directories, read_record
from dsv4kit.sandbox.status import NodeStatus, SandboxStatus
from dsv4kit.sandbox.teardown import tear_down


@pytest.fixture
def layout(tmp_path: Path) -> SandboxPaths:
    return SandboxPaths("t", tmp_path)


@pytest.fixture
def child(layout: SandboxPaths) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, **processes.mark(layout, "node1")}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def test_processes_are_found_by_their_mark(layout: SandboxPaths, child: subprocess.Popen[bytes]) -> None:
    # The mark of another sandbox whose directory starts with the same letters is not ours.
    longer = SandboxPaths("t2", layout.root)
    assert host.poll(lambda: [p.pid for p in processes.find(layout)] == [child.pid], 5)
    assert [p.pid for p in processes.find(layout, "node1")] == [child.pid]
    assert processes.find(layout, "node2") == []
    assert processes.find(longer) == []


def test_a_zombie_counts_as_gone_and_is_not_found(layout: SandboxPaths, child: subprocess.Popen[bytes]) -> None:
    assert host.poll(lambda: bool(processes.find(layout)), 5)
    (process,) = processes.find(layout)
    assert not processes.is_gone(process)
    assert processes.kill_all(layout)
    # Not waited for yet: the pid is still there.
    assert Path(f"/proc/{child.pid}").exists()
    assert processes.is_gone(process)
    assert not processes.kill_all(layout)


def test_a_reused_pid_is_another_process_and_left_alone(layout: SandboxPaths, child: subprocess.Popen[bytes]) -> None:
    assert host.poll(lambda: bool(processes.find(layout)), 5)
    (process,) = processes.find(layout)
    earlier = dataclasses.replace(process, start_ticks=process.start_ticks - 1)
    assert processes.is_gone(earlier)
    processes.kill([earlier])
    assert child.poll() is None


def test_shares_are_recorded_once_and_with_any_name(layout: SandboxPaths, tmp_path: Path) -> None:
    layout.shares.parent.mkdir(parents=True)
    odd = tmp_path / "two words\nand a line"
    odd.mkdir()
    link = tmp_path / "link"
    link.symlink_to(odd)
    shares.record(layout, [odd])
    shares.record(layout, [link, odd])
    assert shares.recorded(layout) == [(str(odd), str(odd)), (str(odd), str(link))]
    with pytest.raises(UserError, match="not a directory"):
        shares.record(layout, [tmp_path / "missing"])


def test_only_private_paths_need_sharing() -> None:
    assert shares.pairs_for(Path("/usr")) == []
    for path in ("/tmp", "/run", "/dev/shm", "/tmp/../tmp"):
        with pytest.raises(UserError, match="itself"):
            shares.pairs_for(Path(path))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"spec": {"nodes": 0}}', '{"spec": {"unknown": 1}, "subnet": ""}'])
def test_a_record_cut_short_counts_as_none(text: str, layout: SandboxPaths) -> None:
    layout.state_dir.mkdir()
    assert read_record(layout) is None
    layout.record.write_text(text)
    assert read_record(layout) is None


def test_a_directory_that_is_no_sandbox_is_left_alone(layout: SandboxPaths) -> None:
    for name in ("bin", "run"):
        (layout.state_dir / name).mkdir(parents=True)
        (layout.state_dir / name / "precious").touch()
    layout.record.write_text("mine")
    with pytest.raises(UserError, match="exists and is not a sandbox's state"):
        make_directories(layout, gpus=0)
    for wipe in (False, True):
        assert not tear_down(layout, wipe=wipe)
    assert (layout.state_dir / "bin" / "precious").exists()
    assert (layout.state_dir / "run" / "precious").exists()
    assert layout.record.read_text() == "mine"


def test_directories_are_readable_whatever_the_umask(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    layout = SandboxPaths("t", tmp_path / "new" / "root")
    before = os.umask(0o077)
    try:
        make_directories(layout, gpus=0)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (layout.root, *layout.state_dir.iterdir())}
    assert (modes["root"], modes["etc"], modes["munge"]) == (0o755, 0o755, 0o700)
    assert tmp_path.stat().st_mode & 0o777 == 0o711


def test_without_root_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="the sandbox needs root"):
        Sandbox.up(SandboxSpec())
    with pytest.raises(UserError, match="the sandbox needs root"):
        Sandbox.take_down()


def test_missing_packages_are_named_where_they_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name in ("slurmd", "apt-get") else name)
    with pytest.raises(UserError, match="the sandbox needs slurmd"):
        packages.require_packages()


def test_a_failed_command_is_one_line() -> None:
    with pytest.raises(UserError, match=r"`ls /nonexistent` failed with exit code 2: .*No such file"):
        host.must(["ls", "/nonexistent"])
    with pytest.raises(UserError, match="no-such-program is not installed"):
        host.run(["no-such-program"])


def test_mount_points_undo_the_kernels_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "36 35 98:0 / /mnt/two\\040words rw - ext4 /dev/root rw"
    monkeypatch.setattr(Path, "read_text", lambda self: line)
    assert host.mount_points() == {"/mnt/two words"}


def test_command_line_of_exec() -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(["exec", "--name", "a", "node1", "--", "ls", "-l", "--", "x"])
    assert (args.node, args.name, cli._command(args.command)) == ("node1", "a", ["ls", "-l", "--", "x"])
    for wrong in ([], ["--"], ["--name", "a", "--", "ls"]):
        with pytest.raises(UserError, match="usage: dsv4kit sandbox exec"):
            cli._command(wrong)


def test_status_table() -> None:
    nodes = [
        NodeStatus("node1", "10.77.0.1", "on", "up", "idle"),
        NodeStatus("node2", "10.77.0.2", "off", "cut", "down*"),
    ]
    status = SandboxStatus("t", "up", "/c", "/l", "10.77.0.0/24", "cgroup", 1, 8, 512, nodes)
    assert "1 GPU, 8 CPUs, 512 MiB per node, pretended" in status.table()
    assert status.table().splitlines()[1:4] == [
        "NODE   ADDRESS    POWER  NETWORK  SLURM",
        "node1  10.77.0.1  on     up       idle",
        "node2  10.77.0.2  off    cut      down*",
    ]
    assert status.as_dict()["nodes"][1]["power"] == "off"
