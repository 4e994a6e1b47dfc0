"""How the trainer comes to the nodes: the site's setup, and the two launchers' own decisions."""

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from test_node import node_spec

from dsv4kit.node import ports, setup
from dsv4kit.node.attempt import Attempt
from dsv4kit.node.launcher import AttemptError
from dsv4kit.node.launchers import BY_NAME
from dsv4kit.node.ray import cluster
from dsv4kit.node.ray.launcher import RayLauncher
from dsv4kit.node.torchrun import TorchrunLauncher
from dsv4kit.run import ends, files
from dsv4kit.run.directory import RunDir
from dsv4kit.run.node_files import NodeFiles, NodeReport, NodesSeen

OWN = NodeReport("n0", "10.0.0.1", time=1.0)


def attempt(run: Path, rank: int = 0) -> Attempt:
    made = Attempt(RunDir(run), segment=1, number=0, rank=rank, job_id="7")
    (made.dir / "nodes").mkdir(parents=True, exist_ok=True)
    return made


class TestSetup:
    def run(self, tmp_path: Path, *lines: str, limit_s: float = 60) -> dict[str, str]:
        spec = node_spec(tmp_path, setup=list(lines), setup_limit_s=limit_s, scratch_dir=str(tmp_path))
        return setup.run(spec, {"PATH": os.environ["PATH"], "KEPT": "1"}, tmp_path / "setup.log")

    def test_what_it_exports_stays_and_what_it_only_sets_does_not(self, tmp_path: Path) -> None:
        env = self.run(tmp_path, "A='two\nlines'", 'export B="$A, it\'s"', "cd /")
        assert env == {"PATH": os.environ["PATH"], "KEPT": "1", "B": "two\nlines, it's"}
        assert [path.name for path in tmp_path.iterdir()] == ["setup.log"]

    def test_without_any_nothing_is_started(self, tmp_path: Path) -> None:
        assert self.run(tmp_path) == {"PATH": os.environ["PATH"], "KEPT": "1"}
        assert not (tmp_path / "setup.log").exists()

    @pytest.mark.parametrize("line", ["false | cat", "false", "exit 3"])
    def test_the_first_command_that_fails_ends_it(self, tmp_path: Path, line: str) -> None:
        with pytest.raises(setup.SetupError, match=r"setup: ended with status [13]: before"):
            self.run(tmp_path, "echo before", line, "echo after")
        assert (tmp_path / "setup.log").read_text() == "before\n"

    def test_it_has_a_limit(self, tmp_path: Path) -> None:
        began = time.monotonic()
        with pytest.raises(setup.SetupError, match="still running after 0 s"):
            self.run(tmp_path, "sleep 60", limit_s=0.2)
        assert time.monotonic() - began < 15


class TestTorchrun:
    def launcher(self, run: Path, rank: int = 0, nodes: int = 2) -> TorchrunLauncher:
        spec = node_spec(run, nodes=nodes, launcher="torchrun", setup_limit_s=0)
        return TorchrunLauncher(spec, attempt(run, rank), dict(os.environ), run / "t")

    def test_each_node_has_slurms_rank_and_node_0s_address(self, tmp_path: Path) -> None:
        words = self.launcher(tmp_path, rank=0).runner(OWN)
        assert {"--nnodes=2", "--node-rank=0", "--master-addr=10.0.0.1", f"--master-port={ports.TORCHRUN}"} <= set(
            words
        )
        assert "--max-restarts=0" in words

    def test_it_begins_when_every_node_has_reported(self, tmp_path: Path) -> None:
        launcher = self.launcher(tmp_path)
        looks = 0

        def watch() -> NodesSeen:
            nonlocal looks
            looks += 1
            NodeFiles(launcher.attempt.files, f"n{looks}").report(NodeReport(f"n{looks}", "a"))
            return launcher.attempt.look()

        launcher.bring_up(OWN, 4, watch)
        assert files.read_json(launcher.attempt.dir / "torchrun.json") == {"address": "10.0.0.1", "target": 4}
        assert looks >= 2

    def test_nodes_that_never_report_end_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        launcher = self.launcher(tmp_path, nodes=3)
        monkeypatch.setattr(time, "sleep", lambda s: None)
        clock = iter(range(0, 10**9, 30))
        monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
        with pytest.raises(AttemptError) as error:
            launcher.bring_up(OWN, 4, launcher.attempt.look)
        assert error.value.evidence == ends.Evidence(ends.BRING_UP, ["3 of 3 agents never reported"])

    def test_the_node_whose_processes_ended_first_has_the_reason(self, tmp_path: Path) -> None:
        launcher = self.launcher(tmp_path)
        nodes = launcher.attempt.dir / "nodes"
        (launcher.attempt.dir / "driver.log").write_text("RuntimeError: NCCL error in: x\n")
        assert launcher.interrupted() is None
        assert launcher.evidence().end == ends.NETWORK
        (nodes / "n1.torchrun.log").write_text("RuntimeError: NCCL error in: x\n")
        (nodes / "n2.torchrun.log").write_text("OSError: [Errno 28] No space left on device\n")
        files.write_json(nodes / "n1.ended", {"status": 1, "time": 9.0})
        files.write_json(nodes / "n2.ended", {"status": 1, "time": 8.0})
        assert launcher.interrupted() == ends.PART_ENDED
        evidence = launcher.evidence()
        assert evidence.end == ends.STORAGE_FULL
        assert evidence.lines == ["n2.torchrun.log: OSError: [Errno 28] No space left on device"]
        # None of these files is taken for a node's report.
        assert launcher.attempt.look().reports == []

    def test_a_worker_waits_for_node_0_and_tells_how_its_processes_ended(self, tmp_path: Path) -> None:
        launcher = self.launcher(tmp_path, rank=1)
        assert launcher.tend(OWN) is None
        assert not list((launcher.attempt.dir / "nodes").iterdir())
        files.write_json(launcher.attempt.dir / "torchrun.json", {"address": "10.0.0.1", "target": 4})
        deadline = time.monotonic() + 60
        while not (ended := list((launcher.attempt.dir / "nodes").glob("*.ended"))):
            assert launcher.tend(OWN) is None  # torchrun is not installed here: it ends at once, and badly
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert files.read_json(ended[0])["status"] != 0


class TestRay:
    OTHERS = (NodeReport("n1", "10.0.0.2"), NodeReport("n2", "10.0.0.3"))

    def blamed(self, run: Path, monkeypatch: pytest.MonkeyPatch, *joined: str) -> AttemptError:
        """What node 0 says once its readiness watch has given up and only these addresses had joined."""
        launcher = RayLauncher(node_spec(run, nodes=3), attempt(run), dict(os.environ), run / "t")
        for report in (OWN, *self.OTHERS):
            NodeFiles(launcher.attempt.files, report.host).report(report)
        files.write_json(launcher.attempt.dir / "ray_nodes.json", list(joined))
        (launcher.attempt.dir / "nodes" / f"{socket.gethostname()}.ray.log").write_text("Exception: timed out\n")
        head = subprocess.Popen(["sleep", "60"])
        monkeypatch.setattr(cluster, "start_head", lambda *_: head)
        monkeypatch.setattr(cluster, "start_readiness_watch", lambda *_: subprocess.Popen(["false"]))
        try:
            with pytest.raises(AttemptError) as error:
                launcher.bring_up(OWN, 4, launcher.attempt.look)
        finally:
            head.kill()
            head.wait()
        return error.value

    def test_nodes_that_did_not_join_are_blamed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        error = self.blamed(tmp_path, monkeypatch, "10.0.0.1", "10.0.0.3")
        assert (error.evidence.end, error.excluded) == (ends.BRING_UP, ["n1"])

    def test_without_a_head_nobody_could_join_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        error = self.blamed(tmp_path, monkeypatch)
        assert error.excluded == ["n0"]
        assert error.evidence.lines[0].startswith("n0: the Ray head was not up after")

    def test_a_head_that_died_is_this_nodes_failure_with_the_process_that_is_gone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launcher = RayLauncher(node_spec(tmp_path, nodes=2), attempt(tmp_path), dict(os.environ), tmp_path / "t")
        assert launcher.own_failure() is None
        head = subprocess.Popen(["sleep", "60"])
        monkeypatch.setattr(cluster, "start_head", lambda *_: head)
        monkeypatch.setattr(cluster, "start_readiness_watch", lambda *_: subprocess.Popen(["true"]))
        launcher.bring_up(OWN, 4, launcher.attempt.look)
        assert launcher.own_failure() is None
        log = launcher.attempt.dir / "nodes" / f"{socket.gethostname()}.ray.log"
        log.write_text(
            "2026-12-01 05:17:16,047\tERR x.py:87 -- \x1b[31mgcs_server\x1b[0m\x1b[2m [exit code=-9]\x1b[0m\nmore\n"
        )
        head.kill()
        failure = launcher.own_failure(patience_s=30)
        assert failure == "Ray on this node ended with status -9, and with it the head; gcs_server [exit code=-9]"


def test_the_launchers_have_the_names_of_the_recipes() -> None:
    assert {"ray": RayLauncher, "torchrun": TorchrunLauncher} == BY_NAME
