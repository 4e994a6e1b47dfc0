"""The parts of the agent, each by itself."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv4kit.node import address, environment, ports, preflight, processes
from dsv4kit.node.ray import cluster
from dsv4kit.node.ray.ready import complete
from dsv4kit.node.sampler import Sampler, sample
from dsv4kit.run import files
from dsv4kit.run import node_spec as node_spec_file
from dsv4kit.run.directory import AttemptDir, RunDir
from dsv4kit.run.node_files import NodeFiles, NodeReport
from dsv4kit.run.node_spec import Limits, NodeResources, NodeSpec
from dsv4kit.run.phases import Mark, Phases, parse, seconds

RESOURCES = NodeResources(cpus=8, gpus=1, object_store_bytes=300_000_000, ready_deadline_s=60)


def node_spec(run_dir: Path, **changes: object) -> NodeSpec:
    fields: dict[str, object] = {
        "run": "r",
        "run_dir": str(run_dir),
        "nodes": 1,
        "total_steps": 6,
        "segment_steps": 3,
        "checkpoint_dir": str(run_dir / "checkpoints"),
        "quarantine_dir": str(run_dir / "quarantine"),
        "checkpoint_contents": ["model", "optimizer", "extra"],
        "module": "stand_in_trainer",
        "overrides": [
            f"trainer.default_local_dir='{run_dir}/checkpoints'",
            "trainer.save_freq=2",
            "trainer.nnodes=1",
            "trainer.n_gpus_per_node=1",
        ],
        "env": {},
        "rollout_seed": None,
        "stops_by_plugin": False,
        "launcher": "ray",
        "data_ranks": None,
        "device": "cpu",
        "cpu_numa_nodes": [0],
        "setup": [],
        "setup_limit_s": 60,
        "interface": None,
        "scratch_dir": "/tmp",
        "sample_interval_s": 0.05,
        "ray": RESOURCES,
        "limits": Limits(min_memory_bytes=1, min_shm_bytes=1, stall_s=30, max_attempts_without_progress=2),
    }
    return NodeSpec(**{**fields, **changes})  # type: ignore[arg-type]


WAS_THERE = """
import subprocess, sys, time
from dsv4kit.node import processes
server = subprocess.Popen(["sleep", "60"])
processes.adopt_orphans()
ours = subprocess.Popen(["sleep", "60"])
ended = processes.end_descendants(grace_s=1)
print(ended == [ours.pid], server.poll())
server.kill()
"""


def test_what_was_there_before_the_agent_is_left_alone() -> None:
    """As squashfuse is, which serves the files of the agent's own container."""
    done = subprocess.run([sys.executable, "-c", WAS_THERE], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True None\n", done.stderr


def test_ranks_and_clusters_of_others_do_not_reach_the_trainer(tmp_path: Path) -> None:
    foreign = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "x", "RAY_ADDRESS": "other:6379", "HOME": str(tmp_path)}
    kept = {"RAY_AUTH_TOKEN": "t", "NCCL_DEBUG": "INFO"}
    env = environment.build({**foreign, **kept}, node_spec(tmp_path), AttemptDir(tmp_path), tmp_path / "t")
    assert not set(env) & (set(foreign) - {"HOME"})
    assert kept.items() <= env.items()
    wanted = environment.build(foreign, node_spec(tmp_path, env={"MASTER_PORT": "1"}), AttemptDir(tmp_path), tmp_path)
    assert wanted["MASTER_PORT"] == "1"


def test_device_nodes_a_container_lacks_are_named(tmp_path: Path) -> None:
    up = {"mlx5_0/1": "4: ACTIVE, 400 Gb/sec (4X NDR)"}
    lacking = " ".join(preflight._devices(tmp_path, up))
    assert "nvidiactl" in lacking
    assert "nvidia-uvm" in lacking
    assert "NCCL would go over TCP" in lacking
    for name in ("nvidiactl", "nvidia-uvm", "infiniband/uverbs0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(preflight._devices(tmp_path, up)) == []


class TestFiles:
    def test_a_file_is_written_as_a_whole(self, tmp_path: Path) -> None:
        files.write_json(tmp_path / "deep" / "x.json", {"é": 1})
        assert files.read_json(tmp_path / "deep" / "x.json") == {"é": 1}
        assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "x.json"]

    def test_what_is_not_there_or_not_json_reads_as_none(self, tmp_path: Path) -> None:
        (tmp_path / "half.json").write_text('{"a": ')
        assert files.read_json(tmp_path / "half.json") is None
        assert files.read_json(tmp_path / "none" / "x.json") is None

    def test_a_line_cut_short_is_left_out(self, tmp_path: Path) -> None:
        growing = files.GrowingFile(tmp_path / "lines")
        assert growing.new_lines() == []
        files.append_json(tmp_path / "lines", {"a": 1})
        with (tmp_path / "lines").open("a") as file:
            file.write('{"a": ')
            file.flush()
            assert growing.new_lines() == [b'{"a": 1}']
            file.write("2}\n")
        assert growing.new_lines() == [b'{"a": 2}']
        assert growing.new_lines() == []

    def test_a_file_that_is_begun_anew_is_read_anew(self, tmp_path: Path) -> None:
        growing = files.GrowingFile(tmp_path / "lines")
        (tmp_path / "lines").write_text("one\ntwo\n")
        assert growing.new_lines() == [b"one", b"two"]
        (tmp_path / "lines").write_text("1\n")
        assert growing.new_lines() == [b"1"]

    def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        files.write_text(tmp_path / "x", "old")

        def fail() -> None:
            with files.replacement(tmp_path / "x") as temporary:
                temporary.write_text("ne")
                raise RuntimeError("half")

        with pytest.raises(RuntimeError, match="half"):
            fail()
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "old")]

    def test_content_and_name_are_on_disk_before_a_write_returns(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced = []
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
        files.write_text(tmp_path / "x", "new")
        content, *name = (path for path in synced if path.startswith(str(tmp_path)))
        assert Path(content).name.startswith(".x.")
        assert name == [str(tmp_path)]


class TestPorts:
    def test_all_lie_below_9000_and_none_twice(self) -> None:
        fixed = list(ports.FIXED.values())
        assert len(set(fixed)) == len(fixed)
        assert all(1024 < port < 9000 for port in [*fixed, ports.WORKER_FIRST, ports.WORKER_LAST])
        assert not any(ports.WORKER_FIRST <= port <= ports.WORKER_LAST for port in [*fixed, 8265])

    def test_every_fixed_port_is_given_to_ray(self) -> None:
        words = " ".join(cluster.head_arguments("10.0.0.1", RESOURCES, Path("/tmp/r")))
        assert all(f"={port}" in words for port in ports.FIXED.values() if port != ports.TORCHRUN)


class TestRay:
    def test_a_worker_gets_no_head_options(self) -> None:
        words = cluster.worker_arguments("10.0.0.2", RESOURCES)
        assert not any(word.startswith(("--head", "--temp-dir", "--port=")) for word in words)
        assert "--num-gpus=1" in words

    def test_sockets_below_the_temporary_directory_fit(self) -> None:
        assert cluster.temp_dir("/tmp", "123456789", 3) == Path("/tmp/ray-123456789-3")
        with pytest.raises(ValueError, match="bytes too long for Ray's sockets"):
            cluster.temp_dir("/scratch/" + "x" * 60, "1", 0)

    def test_a_node_counts_once_it_is_alive_with_all_its_resources(self) -> None:
        class Node:
            def __init__(self, host: str, state: int, gpu: float) -> None:
                self.node_manager_address, self.state, self.resources_total = host, state, {"GPU": gpu, "CPU": 8.0}

        nodes = [Node("b", 0, 1), Node("a", 0, 1), Node("dead", 1, 1), Node("half", 0, 0.5)]
        assert complete(nodes, gpus=1, cpus=8) == ["a", "b"]
        assert complete(nodes, gpus=1, cpus=9) == []

    def test_ray_is_started_again_until_the_cluster_is_ready(self, tmp_path: Path) -> None:
        script = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "import subprocess, time\n"
            "from dsv4kit.node.ray.cluster import Starter\n"
            "started = []\n"
            "def start():\n"
            "    started.append(subprocess.Popen(['false'])); started[-1].wait(); return started[-1]\n"
            "ray = Starter(start, deadline_s=60)\n"
            "print(ray.failure(cluster_is_ready=False), len(started), ray.failure(cluster_is_ready=True))\n"
        )
        root = str(Path(__file__).parents[2])
        done = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "None 2 Ray on this node ended with status 1"

    def test_logs_are_kept_smallest_first_up_to_a_limit(self, tmp_path: Path) -> None:
        logs = tmp_path / "r" / "session_2026-01-01_x" / "logs"
        logs.mkdir(parents=True)
        (logs / "big").write_text("x" * 100)
        (logs / "small").write_text("x")
        (logs / "empty").touch()
        cluster.keep_logs(tmp_path / "r", tmp_path / "kept", limit_bytes=50)
        assert [path.name for path in (tmp_path / "kept").iterdir()] == ["small"]


class TestEnvironment:
    def test_what_misleads_verl_is_taken_out_and_the_runs_own_put_in(self, tmp_path: Path) -> None:
        spec = node_spec(tmp_path, env={"OMP_NUM_THREADS": "1"}, interface="eth0")
        env = environment.build(
            {"PATH": "/bin", "ROCR_VISIBLE_DEVICES": "0"}, spec, AttemptDir(tmp_path / "attempt-0"), tmp_path / "t"
        )
        assert "ROCR_VISIBLE_DEVICES" not in env
        assert env["OMP_NUM_THREADS"] == "1"
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert env["VERL_FILE_LOGGER_PATH"] == str(tmp_path / "attempt-0" / "metrics.jsonl")

    def test_a_home_that_cannot_be_written_to_is_replaced(self, tmp_path: Path) -> None:
        env = environment.build({"HOME": "/nowhere"}, node_spec(tmp_path), AttemptDir(tmp_path), tmp_path / "t")
        assert env["HOME"] == str(tmp_path / "t" / "home")
        env = environment.build({"HOME": str(tmp_path)}, node_spec(tmp_path), AttemptDir(tmp_path), tmp_path / "t")
        assert env["HOME"] == str(tmp_path)

    def test_the_spec_survives_its_file(self, tmp_path: Path) -> None:
        spec = node_spec(tmp_path, overrides=["a='$x `y` \" é'"])
        node_spec_file.write(RunDir(tmp_path), spec.as_dict())
        assert NodeSpec.load(RunDir(tmp_path)) == spec


class TestAddress:
    def test_an_interface_has_an_address(self) -> None:
        assert address.interface_address("lo") == "127.0.0.1"

    def test_an_unknown_interface_lists_those_there_are(self) -> None:
        with pytest.raises(address.AddressError, match=r"'nope0' has no IPv4 address here; interfaces: .*lo"):
            address.own_address("nope0")

    def test_a_loopback_address_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
        with pytest.raises(address.AddressError, match=r"resolves to 127\.0\.1\.1; set network\.interface"):
            address.own_address(None)


class TestPreflight:
    def test_a_node_with_everything_has_no_problems(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert preflight.check(node_spec(tmp_path), "127.0.0.1", NodeFiles(AttemptDir(tmp_path), "n1")).problems == []

    def test_what_is_missing_is_named_with_its_number(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        limits = Limits(min_memory_bytes=2**60, min_shm_bytes=2**60, stall_s=1, max_attempts_without_progress=1)
        spec = node_spec(tmp_path, limits=limits, scratch_dir=str(tmp_path / "none"))
        problems = "\n".join(preflight.check(spec, "127.0.0.1", NodeFiles(AttemptDir(tmp_path), "n1")).problems)
        assert "GiB available, 1073741824.0 GiB needed" in problems
        assert "/dev/shm" in problems
        assert "not there or not writable" in problems
        assert "0 GPUs given by Slurm" in problems

    def test_a_port_in_use_is_named_with_its_purpose(self, tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", ports.OBJECT_MANAGER))
            taken.listen()
            problems = preflight.check(node_spec(tmp_path), "127.0.0.1", NodeFiles(AttemptDir(tmp_path), "n1")).problems
        assert any("6381 (object manager)" in problem for problem in problems)

    def test_a_clock_far_from_the_others_is_named(self) -> None:
        reports = [NodeReport(f"n{i}", "", time=1000.0 + offset) for i, offset in enumerate([0, 1, 2, 400])]
        assert preflight.Clocks(began=990.0).off(reports, now=1002.0) == ["n3: its clock is +398 s off"]
        behind = NodeReport("slow", "", time=500.0)
        assert preflight.Clocks(began=990.0).off([behind], now=1002.0) == ["slow: its clock is more than 490 s behind"]
        assert preflight.Clocks(began=None).off([behind], now=1002.0) == []

    def test_a_report_that_was_long_in_coming_says_nothing_about_a_clock(self) -> None:
        """NFS shows a file to another client when its cache runs out, minutes later under load."""
        clocks = preflight.Clocks(began=990.0)
        assert clocks.off([], now=1000.0) == []
        assert clocks.off([NodeReport("late", "", time=1000.0)], now=1300.0) == []

    @pytest.mark.parametrize(
        ("given", "device", "problems"),
        [
            (None, "cuda", 0),
            (None, "cpu", 1),
            ("", "cuda", 1),
            ("NoDevFiles", "cuda", 1),
            ("NoDevFiles", "cpu", 1),
            ("0", "cuda", 0),
        ],
    )
    def test_gpus_that_slurm_does_not_count_are_counted_by_the_driver(
        self, monkeypatch: pytest.MonkeyPatch, given: str | None, device: str, problems: int
    ) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert len(preflight._gpus(1, device)) == problems


class TestProcesses:
    def test_a_process_that_ignores_sigterm_is_ended_all_the_same(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        process = processes.start(
            ["bash", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"], os.environ, log, tmp_path
        )
        while "up" not in log.read_text():
            time.sleep(0.01)
        assert processes.end(process, grace_s=0.2) == -signal.SIGKILL

    def test_orphans_of_orphans_are_ended_too(self, tmp_path: Path) -> None:
        script = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "import os, pathlib, subprocess, time\n"
            "from dsv4kit.node import processes\n"
            "processes.adopt_orphans()\n"
            "subprocess.run(['bash', '-c', '(setsid sleep 300 & echo $! > pid) & (setsid setsid sleep 300 &) &'])\n"
            "def command(pid):\n"
            "    try: return pathlib.Path(f'/proc/{pid}/comm').read_text().strip()\n"
            "    except OSError: return 'gone'\n"
            "while [command(p) for p in processes.descendants(os.getpid())] != ['sleep'] * 2: time.sleep(0.01)\n"
            "print(len(processes.end_descendants(grace_s=1)), len(processes.descendants(os.getpid())))\n"
        )
        root = str(Path(__file__).parents[2])
        done = subprocess.run(
            [sys.executable, "-c", script, root], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["2", "0"]
        assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


class TestSampler:
    def test_a_sample_has_the_memory_of_the_node(self) -> None:
        values = sample()
        assert values["memory_used_mib"] > 0
        assert "shm_used_mib" in values

    def test_lines_are_added_until_it_is_stopped(self, tmp_path: Path) -> None:
        sampler = Sampler(tmp_path / "node.csv", interval_s=0.01)
        sampler.start()
        while not (tmp_path / "node.csv").exists() or len((tmp_path / "node.csv").read_text().splitlines()) < 3:
            time.sleep(0.01)
        sampler.stop()
        lines = (tmp_path / "node.csv").read_text().splitlines()
        assert lines[0].startswith("time,memory_used_mib,")
        assert {line.count(",") for line in lines} == {lines[0].count(",")}


def test_phases_are_lines_with_their_time(tmp_path: Path) -> None:
    phases = Phases(tmp_path / "phases.jsonl")
    phases.begin("a")
    phases.begin("b")
    phases.begin("b")
    phases.note("something to know")
    marks, notes = parse((tmp_path / "phases.jsonl").read_bytes().splitlines())
    assert [mark.phase for mark in marks] == ["a", "b"]
    assert notes == ["something to know"]


def test_the_parts_of_a_phase_are_put_together() -> None:
    marks = [Mark("steps", 10.0), Mark("save", 14.0), Mark("steps", 16.5), Mark("save", 20.0)]
    assert seconds(marks, ended=None) == {"steps": 7.5, "save": 2.5}
    assert seconds(marks, ended=21.0) == {"steps": 7.5, "save": 3.5}
