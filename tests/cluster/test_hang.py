"""A hang explains itself: where every process is, and which node is the odd one."""

import re
import signal
from collections.abc import Iterator

import pytest
from test_chain import Cluster

from dsv4kit.errors import UserError
from dsv4kit.launch.explain import ask_running
from dsv4kit.run import ends, outcome
from dsv4kit.sandbox.cluster import Sandbox
from dsv4kit.sandbox.runtime import runtime_python


@pytest.fixture(scope="module")
def cluster(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(sandbox, tmp_path_factory.mktemp("hangs"), runtime_python())
    yield made
    made.slurm.run("scancel", "--me")


def test_a_stopped_process_is_found_named_and_its_node_avoided(cluster: Cluster) -> None:
    changes = [("env.STAND_IN_GATE", f"2:{cluster.root / 'never'}"), ("watch.stall_s", 24), ("schedule.steps", 2)]
    run = cluster.submit_sft("hang", *changes, ("schedule.segment_steps", 2), nodes=2)
    cluster.wait(run, lambda state: state.saved_step == 1)
    found, nodes = ask_running(run, cluster.slurm)
    assert nodes == 2
    ranks = [stack for stack in found if stack.name == "stand_in_sft"]
    assert sorted(stack.host for stack in ranks) == ["node1", "node2"]
    assert {stack.frames[0].function for stack in ranks} == {"wait_at_gate"}

    victim = next(stack for stack in ranks if stack.host == "node2")
    cluster.sandbox.exec("node2", ["kill", f"-{signal.SIGSTOP.value}", str(victim.pid)])
    try:
        cluster.wait(run, lambda state: bool(state.segments[0].end))
    finally:
        cluster.sandbox.exec("node2", ["bash", "-c", f"kill -{signal.SIGKILL.value} {victim.pid} || true"])
    ended = outcome.load(run.segment(1).attempt(0))
    assert ended is not None
    assert ended.end == ends.STALLED
    assert ended.evidence[1] == f"1 of 2 stand_in_sft (node2 pid {victim.pid}): stopped by a signal"
    assert ended.excluded_nodes == ["node2"]
    assert any(re.match(r"no sign of life for 1\d s: \d of 2 stand_in_sft", note) for note in ended.notes), ended.notes
    cluster.wait(run)
    with pytest.raises(UserError, match="no segment is running"):
        ask_running(run, cluster.slurm)
