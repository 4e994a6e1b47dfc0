"""A run begun by the code at commit 03a24f3, before the run directory had a room of its own.

`tests/data/run-of-03a24f3` was made by that code on a sandbox of two nodes, with the stand-in trainer: three steps in
two segments, the first of which crashes before its second step. Left out are the frozen kit, the checkpoints (their
tracker is there) and Ray's logs; paths of the machine became `/shared/...`.
"""

import json
import shutil
from pathlib import Path

import pytest
from test_state import Queue
from test_submission import Cluster

from dsv4kit.cli.follow import progress_lines
from dsv4kit.cli.status import table
from dsv4kit.launch.resume import Resumption
from dsv4kit.launch.run_dir import read_record
from dsv4kit.launch.state import read_state
from dsv4kit.run import ends, node_files, outcome, samples
from dsv4kit.run.directory import RunDir
from dsv4kit.run.node_spec import NodeSpec

MADE = Path(__file__).parents[1] / "data" / "run-of-03a24f3"
# What `NodeSpec.load` of that commit takes, and not one key more: its frozen agents read the file again at each start.
KEYS_OF_NODE_JSON = {
    *("run", "run_dir", "nodes", "total_steps", "segment_steps", "checkpoint_dir", "quarantine_dir"),
    *("checkpoint_contents", "module", "overrides", "env", "rollout_seed", "stops_by_plugin", "launcher", "data_ranks"),
    *("setup", "setup_limit_s", "device", "cpu_numa_nodes", "interface", "scratch_dir", "sample_interval_s"),
    *("ray", "limits"),
}
KEYS_OF_RAY = {"cpus", "gpus", "object_store_bytes", "ready_deadline_s"}
KEYS_OF_LIMITS = {"min_memory_bytes", "min_shm_bytes", "stall_s", "max_attempts_without_progress"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The run, as if it had been made below `tmp_path`."""
    run = RunDir(tmp_path / "runs" / "before-rooms")
    shutil.copytree(MADE, run.path)
    for path in (run.node_spec_file, run.record_file):
        path.write_text(path.read_text().replace("/shared/runs/before-rooms", str(run.path)))
    return run


def test_its_state_is_read(run: RunDir) -> None:
    state = read_state(run, Queue())
    assert (state.state, state.reason) == ("finished", "all 3 steps are saved")
    assert [(one.start_step, one.end_step, one.end) for one in state.segments] == [
        (0, 1, ends.NETWORK),
        (1, 3, ends.COMPLETED),
    ]
    assert state.rewards == {1: 0.01, 2: 0.02, 3: 0.03}
    assert state.segments[0].evidence == ["RuntimeError: NCCL error: unhandled system error"]
    assert list(state.segments[0].seconds) == ["bring-up", "trainer start", "steps", "end"]
    assert "segment 1: network, steps 0 to 1 saved" in progress_lines(state)
    assert "before-rooms: finished, 3 of 3 steps saved, last reward 0.030" in table(state)


def test_all_that_its_nodes_wrote_is_read(run: RunDir) -> None:
    assert [past.next for past in outcome.history(run)] == [outcome.CONTINUE, outcome.FINISHED]
    attempt = run.segment(1).attempt(0)
    assert [report.host for report in node_files.reports(attempt)] == ["node1", "node2"]
    rows = list(samples.read(node_files.sampled(attempt)[0].samples))
    assert all(row[samples.MEMORY_USED] > 0 for row in rows)
    assert NodeSpec.load(run).total_steps == 3


def test_what_a_resume_writes_for_its_nodes_is_what_their_frozen_agents_take(run: RunDir, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    Resumption(run, cluster.slurm, steps=7, from_step=0).submit(lambda line: None)
    spec = json.loads(run.node_spec_file.read_text())
    assert spec["total_steps"] == 7
    assert spec == json.loads((MADE / "node.json").read_text().replace("/shared/runs/before-rooms", str(run.path))) | {
        "total_steps": 7
    }
    assert (spec.keys(), spec["ray"].keys(), spec["limits"].keys()) == (KEYS_OF_NODE_JSON, KEYS_OF_RAY, KEYS_OF_LIMITS)
    # Its agents look for the first of these in the first new segment, and its batch script for the others by name.
    segment = run.path / "segments" / "0003"
    assert json.loads((segment / "request.json").read_text()) == {"from_step": 0, "allow_restart": True}
    script = (segment / "segment.sbatch").read_text()
    assert all(name in script for name in ('/verdict"', '/excluded_nodes"', '/STOP"'))
    assert read_record(run)["settings"]["schedule"]["steps"] == 7
    assert [link.segment for link in run.chain() if not link.spare] == [1, 2, 3, 4, 5, 6]
