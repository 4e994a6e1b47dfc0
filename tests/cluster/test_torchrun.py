"""SFT's chain on a real Slurm and a real torchrun, with a stand-in for verl's trainer."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_chain import Cluster, steps

from dsv4kit.launch.cancel import cancel_run
from dsv4kit.launch.resume import Resumption
from dsv4kit.run import ends
from dsv4kit.run.directory import RunDir
from dsv4kit.run.phases import IMPORT
from dsv4kit.sandbox.cluster import Sandbox
from dsv4kit.sandbox.runtime import runtime_python


@pytest.fixture(scope="module")
def cluster(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(sandbox, tmp_path_factory.mktemp("sft"), runtime_python())
    yield made
    made.slurm.run("scancel", "--me")


def submit(cluster: Cluster, name: str, *changes: tuple[str, object], fault: str = "") -> RunDir:
    return cluster.submit_sft(name, *changes, fault=fault, nodes=2)


def test_two_segments_of_two_nodes_and_a_resume_of_the_finished_run_trains_nothing(cluster: Cluster) -> None:
    run = submit(cluster, "whole", ("schedule.steps", 4))
    state = cluster.wait(run)
    assert (state.state, steps(state)) == ("finished", [(0, 2), (2, 4)])
    assert sorted(state.losses) == [1, 2, 3, 4]
    assert state.measure[0] == "loss"
    assert (run.path / "checkpoints" / "global_step_4" / "dsv4kit.sizes.json").exists()
    attempt = run.segment(1).path / "attempt-0"
    assert "rank 1 of 2" in next((attempt / "nodes").glob("*.torchrun.log")).read_text()
    assert not (attempt / "ray_head.json").exists()

    # A segment too many, as a chain has one after a crash that was caught up with.
    spec = run.node_spec_file.read_text()
    Resumption(run, cluster.slurm, steps=6).submit(print)
    run.node_spec_file.write_text(spec)
    state = cluster.wait(run, lambda state: state.segments[-1].over)
    assert state.segments[-1].end == ends.NOTHING_TO_DO
    assert state.saved_step == 4


def test_processes_that_die_on_another_node_end_the_attempt_with_their_own_reason(cluster: Cluster) -> None:
    run = submit(cluster, "crash", ("schedule.steps", 4), ("schedule.segment_steps", 4), fault="crash@3")
    state = cluster.wait(run)
    outcome = json.loads((run.segment(1).path / "attempt-0" / "outcome.json").read_text())
    assert outcome["end"] == ends.OUT_OF_GPU_MEMORY
    assert outcome["evidence"][0].startswith("node")
    assert any("first to fail: rank 1 on " in line and "exit status 1" in line for line in outcome["evidence"])
    assert outcome["excluded_nodes"] == []
    assert steps(state) == [(0, 2)]


def test_a_run_that_its_user_cancels_says_so_everywhere(cluster: Cluster) -> None:
    run = submit(cluster, "unwanted", ("env.STAND_IN_STEP_S", "600"))
    cluster.wait(run, lambda state: state.segments[0].phase == IMPORT)
    assert cancel_run(run, cluster.slurm) == (3, {})
    state = cluster.wait(run, lambda state: state.over and state.segments[0].end is not None)
    assert (state.state, state.segments[0].end) == ("cancelled", ends.CANCELLED)
    assert "segment 1: cancelled, stop: by the user, at step 0" in (run.segment(1).path / "slurm.log").read_text()


def test_a_setup_that_fails_on_a_node_is_that_nodes_fault(cluster: Cluster) -> None:
    from dsv4kit.config.loading import load_site

    lines = ["export FROM_SETUP=yes", "[ $(hostname) != node2 ] || { echo no wheelhouse here; false; }"]
    site = load_site("sandbox").model_copy(update={"setup": lines})
    run = cluster.submit(
        "setup",
        ("recipe.module", "stand_in_sft"),
        ("schedule.steps", 2),
        ("schedule.segment_steps", 1),
        recipe="sft",
        site=site,
    )
    state = cluster.wait(run)
    outcome = json.loads((run.segment(1).path / "attempt-0" / "outcome.json").read_text())
    assert (outcome["end"], outcome["excluded_nodes"]) == (ends.PREFLIGHT, ["node2"])
    assert "setup: ended with status 1" in outcome["evidence"][0]
    assert "no wheelhouse here" in outcome["evidence"][0]
    assert steps(state)[1] == (0, 1)


def test_slurm_takes_the_options_of_a_site(cluster: Cluster, tmp_path: Path) -> None:
    from dsv4kit.config.loading import load_settings, load_site
    from dsv4kit.launch.render import SegmentScript

    site = load_site("sandbox")
    slurm = site.slurm.model_copy(
        update={
            "exclusive": True,
            "all_memory": True,
            "gpu_option": "gres",
            "account": "a",
            "qos": "q",
            "version": "22.05.8",
        }
    )
    site = site.model_copy(update={"slurm": slurm})
    text = SegmentScript(load_settings("cpu", "tiny", "sft").settings, site, RunDir(tmp_path / "r"), 1).render("true")
    path = tmp_path / "script"
    path.write_text(text)
    cluster.slurm.run("sbatch", "--test-only", str(path))
