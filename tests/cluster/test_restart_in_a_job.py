"""A fault inside a job: its trainer is started again there, from the last complete checkpoint, with a fresh Ray."""

from collections.abc import Iterator

import pytest
from test_chain import Cluster, steps

from dsv4kit.run import ends, outcome
from dsv4kit.sandbox.cluster import Sandbox
from dsv4kit.sandbox.runtime import runtime_python


@pytest.fixture(scope="module")
def cluster(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(sandbox, tmp_path_factory.mktemp("restarts"), runtime_python())
    yield made
    made.slurm.run("scancel", "--me")


def test_a_crash_on_two_nodes_is_started_again_in_the_same_job(cluster: Cluster) -> None:
    changes = [("watch.restarts", 1), ("schedule.steps", 3), ("schedule.segment_steps", 3)]
    run = cluster.submit("again", *changes, fault="crash@2")
    state = cluster.wait(run)
    assert (state.state, steps(state)) == ("finished", [(1, 3)])
    first, second = (outcome.load(attempt) for attempt in run.segment(1).attempts())
    assert first is not None
    assert second is not None
    assert (first.start, first.reached, first.end, first.again) == (0, 1, ends.NETWORK, True)
    assert (second.start, second.reached, second.end, second.again) == (1, 3, ends.COMPLETED, False)
    assert first.job_id == second.job_id
    assert sorted(state.rewards) == [1, 2, 3]
    assert state.segments[0].notes[0].startswith(f"attempt 0 ended at step 1: {ends.NETWORK} (")
    assert state.segments[0].notes[0].endswith(" s later")


def test_faults_beyond_the_limit_are_left_to_the_next_job(cluster: Cluster) -> None:
    changes = [("watch.restarts", 1), ("watch.max_attempts_without_progress", 3), ("schedule.segment_steps", 3)]
    run = cluster.submit_sft("beyond", *changes, fault="oom@1!", nodes=2)
    state = cluster.wait(run)
    assert state.state == "stopped"
    found = [(past.segment, past.attempt, past.again) for past in outcome.history(run)]
    assert found == [(1, 0, True), (1, 1, False), (2, 0, False)]
