"""The doctor's visit to the nodes of a real cluster: setup, checks, collectives, the table."""

import dataclasses
from pathlib import Path

import pytest

from dsv4kit.cli.doctor import node_table
from dsv4kit.config.loading import Override, load_settings, load_site
from dsv4kit.launch.doctor import examine
from dsv4kit.launch.doctor_visit import Visit, send
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.submission import Submission
from dsv4kit.run.directory import RunDir
from dsv4kit.sandbox.cluster import Sandbox
from dsv4kit.sandbox.runtime import runtime_python


@pytest.fixture(scope="module")
def submission(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Submission:
    root, python = tmp_path_factory.mktemp("doctor"), runtime_python()
    sandbox.share([root, python.parents[1]])
    overrides = [Override("schedule.nodes", 2, "test"), Override("hardware.min_memory_gib", 0.1, "test")]
    resolved = load_settings("cpu", "tiny", "sft", overrides)
    return Submission(
        resolved, load_site("sandbox"), RunDir(root / "r"), Slurm(sandbox.client_env), str(python), "/m", "/d"
    )


def visited(submission: Submission) -> Visit:
    visit = send(submission, submission.run.path.parent)
    visit.wait(print)
    return visit


def test_the_login_node_finds_the_sandbox_well(submission: Submission) -> None:
    assert [finding for finding in examine(submission) if finding.level == "problem"] == []


def test_two_nodes_are_well_and_measured(submission: Submission) -> None:
    visit = visited(submission)
    assert visit.problem() == ""
    reports = visit.reports()
    assert len(reports) == 2
    assert all("torch" in str(report.facts["versions"]) for report in reports)
    measured = visit.bandwidth()
    assert measured["ranks"] == 2
    assert measured["all_reduce_gb_s"] > 0
    assert measured["all_to_all_gb_s"] > 0
    assert all(rates["to_next_gb_s"] > 0 for rates in measured["nodes"].values())
    assert len(node_table(reports, measured).splitlines()) == 3


def test_a_bad_node_is_named_the_others_are_shown_and_nothing_is_measured(submission: Submission) -> None:
    site = submission.site.model_copy(update={"setup": ["[ $(hostname) != node1 ]"]})
    visit = visited(dataclasses.replace(submission, site=site))
    assert visit.problem() == "not measured: node1 would not take part in a run"
    assert {report.host: len(report.problems) for report in visit.reports()} == {"node1": 1, "node2": 0}
    assert not Path(visit.run.segment(1).path / "attempt-0" / "bandwidth.json").exists()
