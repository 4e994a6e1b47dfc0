"""What becomes of a run when a node of it fails, dies or is taken away: real Slurm, real Ray, a stand-in trainer."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_chain import Cluster, steps

from dsv4kit.launch.cancel import cancel_run
from dsv4kit.launch.resume import Resumption
from dsv4kit.run import ends, outcome
from dsv4kit.run.directory import RunDir
from dsv4kit.run.node_files import reports
from dsv4kit.sandbox.cluster import Sandbox
from dsv4kit.sandbox.runtime import runtime_python


@pytest.fixture(scope="module")
def cluster(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(sandbox, tmp_path_factory.mktemp("nodes"), runtime_python())
    yield made
    made.slurm.run("scancel", "--me")


def test_a_node_that_fails_its_preflight_is_named_and_avoided(cluster: Cluster) -> None:
    full = "head -c 100000000 /dev/zero > /dev/shm/full"
    cluster.sandbox.exec("node2", ["bash", "-c", full])
    shm_gib = 3.95
    try:
        size = cluster.sandbox.exec("node1", ["bash", "-c", "df --output=avail -B1 /dev/shm | tail -1"], capture=True)
        shm_gib = int(size.stdout) / 2**30 - 0.05
        changes = [("schedule.steps", 2), ("schedule.segment_steps", 1), ("hardware.min_shm_gib", shm_gib)]
        changes.append(("schedule.spare_segments", 2))
        run = cluster.submit_sft("bad-node", *changes, nodes=2)
        cluster.wait(run, lambda state: state.segments[0].over)
        outcome = json.loads((run.segment(1).path / "attempt-0" / "outcome.json").read_text())
        assert outcome["end"] == ends.PREFLIGHT
        assert outcome["excluded_nodes"] == ["node2"]
        assert "node2: /dev/shm" in outcome["evidence"][0]
        state = cluster.wait(run)
        assert "node2" not in cluster.nodes_of(state.segments[1].job_id)
        # A spare segment makes up for the one that failed; the second one is not needed.
        assert (state.state, steps(state)) == ("finished", [(0, 0), (0, 1), (1, 2)])
        assert cluster.slurm.live(run.job_name) == {}
    finally:
        cluster.sandbox.exec("node2", ["rm", "/dev/shm/full"])


def test_a_node_where_python_does_not_start_is_named_and_avoided(cluster: Cluster) -> None:
    hidden = str(cluster.python.parent)
    cluster.sandbox.exec("node2", ["mount", "-t", "tmpfs", "none", hidden])
    try:
        run = cluster.submit_sft("no-python", ("schedule.steps", 2), ("schedule.segment_steps", 1), nodes=2)
        state = cluster.wait(run)
    finally:
        cluster.sandbox.exec("node2", ["umount", hidden])
    first = outcome.load(run.segment(1).attempt(0))
    assert first is not None
    assert (first.end, first.excluded_nodes) == (ends.NEVER_STARTED, ["node2"])
    assert "No such file or directory" in " ".join(first.evidence)
    assert "node2" not in cluster.nodes_of(state.segments[1].job_id)
    assert steps(state) == [(0, 0), (0, 1)]
    (found,) = state.excluded_nodes
    assert (found["node"], found["segment"]) == ("node2", 1)
    links = Resumption(run, cluster.slurm).submit(print)
    assert '#SBATCH --exclude="node2"\n' in run.segment(links[0].segment).script.read_text()
    assert cluster.wait(run).state == "finished"


def test_losing_a_node_starts_the_segment_again_from_the_checkpoint(cluster: Cluster) -> None:
    # Slurm takes up to 31 s to notice; the first attempt is still at its second step then.
    run = cluster.submit("lost", ("schedule.steps", 3), ("schedule.segment_steps", 3), fault="hang@2")
    state = cluster.wait(run, lambda state: state.saved_step >= 1)
    victim = cluster.nodes_of(state.segments[0].job_id)
    node = f"node{victim.rstrip(']')[-1]}"
    cluster.sandbox.kill_node(node)
    try:
        state = cluster.wait(run, limit_s=600)
        assert state.state == "finished"
        assert state.segments[0].attempts == 2
        assert state.segments[0].start_step is not None
        assert state.segments[0].start_step >= 1
        first = outcome.load(run.segment(1).attempt(0))
        assert first is not None
        assert first.evidence[0] == f"srun: error: Node failure on {node}"
    finally:
        cluster.sandbox.start_node(node)


def test_a_dead_gcs_is_the_first_nodes_fault_at_once_and_never_the_workers(cluster: Cluster) -> None:
    """It took a minute, ended as unknown, and the healthy workers were avoided from then on."""
    run = cluster.submit("headless", ("schedule.steps", 2), ("env.STAND_IN_GATE", f"1:{cluster.root}/headless-gate"))
    state = cluster.wait(run, lambda state: "import" in state.segments[0].seconds)
    job_id = state.segments[0].job_id
    driver_log = run.segment(1).attempt(0).driver_log
    wait_for(lambda: "scratch" in driver_log.read_text())
    (gcs,) = [pid for pid, line in _processes() if "gcs_server" in line and f"ray-{job_id}-0" in line]
    os.kill(gcs, signal.SIGKILL)
    began = time.time()
    wait_for(lambda: outcome.load(run.segment(1).attempt(0)) is not None)
    cancel_run(run, cluster.slurm)
    found = json.loads(run.segment(1).attempt(0).outcome_file.read_text())
    assert found["end"] == ends.NODE_LOST
    head = json.loads(run.segment(1).attempt(0).ray_head_file.read_text())["address"].partition(":")[0]
    (first,) = [report.host for report in reports(run.segment(1).attempt(0)) if report.address == head]
    assert found["excluded_nodes"] == [first]
    assert found["evidence"][0].startswith(f"{first}: Ray on this node ended with status ")
    assert "gcs_server" in found["evidence"][0]
    assert found["ended"] - began < 30, "Ray itself takes a minute"
    cluster.wait(run)


def test_a_killed_agent_is_named_with_its_node(cluster: Cluster) -> None:
    """Slurm ends the others with it, and all that was told was that Slurm did."""
    run = cluster.submit_sft("beheaded", ("env.STAND_IN_GATE", f"2:{cluster.root}/beheaded-gate"), nodes=2)
    cluster.wait(run, lambda state: state.saved_step == 1)
    (agent,) = [pid for pid, line in _processes() if "submitit.core" in line and run.name in line and _rank(pid) == "1"]
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: outcome.load(run.segment(1).attempt(0)) is not None)
    cancel_run(run, cluster.slurm)
    found = json.loads(run.segment(1).attempt(0).outcome_file.read_text())
    assert found["end"] == ends.TERMINATED
    assert found["evidence"][0] == "srun: error: node2: task 1: Killed"
    cluster.wait(run)
    # The directory that it left in its node's scratch goes with the next attempt there.
    job_id = run.chain()[0].job_id
    left = f"test -d /tmp/ray-{job_id}-0"
    assert cluster.sandbox.exec("node2", ["bash", "-c", left]).returncode == 0
    run = cluster.submit_sft("beside", ("schedule.steps", 1), nodes=2)
    assert cluster.wait(run).state == "finished"
    assert cluster.sandbox.exec("node2", ["bash", "-c", left]).returncode == 1
    assert f"left by job {job_id}, whose agent is gone" in run.segment(1).log.read_text()


def test_a_segment_cancelled_while_it_waits_does_not_start_its_successor_beside_the_running_one(
    cluster: Cluster,
) -> None:
    gate = cluster.root / "middle-gate"
    run = cluster.submit_sft("middle", ("env.STAND_IN_GATE", f"2:{gate}"))
    state = cluster.wait(run, lambda state: "import" in state.segments[0].seconds)
    cluster.slurm.cancel([state.segments[1].job_id])
    time.sleep(2)
    gate.touch()
    state = cluster.wait(run)
    assert [steps(state)[0], steps(state)[2]] == [(0, 2), (2, 4)]
    first, last = state.segments[0].job_id, state.segments[2].job_id
    assert cluster.shown(last, "StartTime") >= cluster.shown(first, "EndTime")


def test_a_finished_segment_that_slurm_starts_again_leaves_the_running_one_alone(cluster: Cluster) -> None:
    gate = cluster.root / "twice-gate"
    run = cluster.submit_sft("twice", ("env.STAND_IN_GATE", f"3:{gate}"))
    state = cluster.wait(run, lambda state: "import" in state.segments[1].seconds)
    cluster.slurm.run("scontrol", "requeue", state.segments[0].job_id)
    cluster.slurm.run("scontrol", "update", f"JobId={state.segments[0].job_id}", "Dependency=")
    rival = run.segment(1).path / "attempt-1" / "outcome.json"
    state = cluster.wait(run, lambda state: rival.exists() or state.over)
    gate.touch()
    outcome = json.loads(rival.read_text())
    assert (outcome["end"], outcome["verdict"]) == (ends.ANOTHER_LIVE, "continue")
    assert f"job {state.segments[1].job_id} on node" in outcome["evidence"][0]
    assert not (run.segment(1).path / "attempt-1" / "driver.log").exists()
    state = cluster.wait(run)
    assert state.state == "finished"
    assert steps(state)[1:] == [(2, 4), (4, 6)]
    assert not (run.path / "lease.json").exists()


def test_cancelling_ends_the_driver_and_every_waiting_segment_and_leaves_no_process(cluster: Cluster) -> None:
    run = cluster.submit("cancelled", ("env.STAND_IN_STEP_S", "5"), ("schedule.save_freq", 2))
    state = cluster.wait(run, lambda state: "import" in state.segments[0].seconds)
    assert cancel_run(run, cluster.slurm) == (len(state.segments), {})
    state = cluster.wait(run)
    assert {segment.state for segment in state.segments} == {"CANCELLED"}
    assert (state.state, state.segments[0].end) == ("cancelled", ends.CANCELLED)
    deadline = time.monotonic() + 30
    while left := _run_processes(run):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def wait_for(fact: Callable[[], bool], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _run_processes(run: RunDir) -> list[str]:
    """Command lines of processes, on any node, that name the run's directory."""
    return [line for _, line in _processes() if str(run.path) in line]


def _processes() -> list[tuple[int, str]]:
    """Pid and command line of every other process, on any node."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found.append((int(entry.name), line))
    return found


def _rank(pid: int) -> str:
    """Slurm's number of the task that the process belongs to."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((one[13:].decode() for one in variables if one.startswith(b"SLURM_PROCID=")), "")
