"""Whom node 0 blames when an attempt ends: nodes that said so, its own head, or nobody but Slurm."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from test_node import node_spec

from dsv4kit.node.attempt import Attempt
from dsv4kit.node.launcher import AttemptError
from dsv4kit.node.lead import Lead
from dsv4kit.run import ends
from dsv4kit.run.course import Course
from dsv4kit.run.directory import RunDir
from dsv4kit.run.ends import Evidence
from dsv4kit.run.node_files import NodeFiles, NodeReport

OWN, OTHER = NodeReport("n0", "10.0.0.1", time=1.0), NodeReport("n1", "10.0.0.2", time=1.0)
GONE = "Ray on this node ended with status 1: raylet [exit code=-9]"


@pytest.fixture
def lead(tmp_path: Path) -> Lead:
    """Node 0 of two nodes, both of which take part."""
    attempt = Attempt(RunDir(tmp_path), segment=1, number=0, rank=0, job_id="7")
    attempt.files.nodes.mkdir(parents=True)
    attempt.segment_dir.log.write_text("what an earlier start said: srun: error: n9: task 9: Killed\n")
    for report in (OWN, OTHER):
        NodeFiles(attempt.files, report.host).report(report)
    return Lead(node_spec(tmp_path, nodes=2), attempt, threading.Event())


def concluded(lead: Lead, evidence: Evidence, excluded: list[str]) -> dict[str, Any]:
    lead._conclude(Course(0, 2), evidence, excluded)
    found: dict[str, Any] = json.loads(lead.attempt.files.outcome_file.read_text())
    return found


def test_a_node_that_cannot_go_on_is_told_with_its_words_and_avoided(lead: Lead) -> None:
    """The end was right, and neither node nor cause was told."""
    NodeFiles(lead.attempt.files, "n1").fail(GONE)
    with pytest.raises(AttemptError) as error:
        lead._blame(OWN, None)
    found = concluded(lead, error.value.evidence, error.value.excluded)
    assert (found["end"], found["evidence"], found["excluded_nodes"]) == (ends.NODE_LOST, [f"n1: {GONE}"], ["n1"])
    (line,) = lead.attempt.run.exclusions_file.read_text().splitlines()
    assert json.loads(line)["reason"] == GONE


def test_a_worker_that_lost_a_dead_head_did_not_fail(lead: Lead) -> None:
    NodeFiles(lead.attempt.files, "n1").fail("Ray on this node ended with status 1: no GCS")
    with pytest.raises(AttemptError) as error:
        lead._blame(OWN, "Ray on this node ended with status 1, and with it the head; gcs_server [exit code=-9]")
    found = concluded(lead, error.value.evidence, error.value.excluded)
    assert found["end"] == ends.NODE_LOST
    assert found["evidence"][0].startswith("n0: ")
    assert found["excluded_nodes"] == ["n0"]


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: n1: task 1: Killed",
        "srun: error: n1: task 1: Exited with exit code 1",
        "srun: error: Node failure on n1",
        "slurmstepd-n0: error: *** STEP 7.0 ON n0 CANCELLED AT 2026-12-01T05:00:00 DUE TO PREEMPTION ***",
    ],
)
def test_why_slurm_ended_it_is_in_slurms_own_words(lead: Lead, line: str) -> None:
    with lead.attempt.segment_dir.log.open("a") as log:
        log.write(f"n0: agent of segment 1\n{line}\nsrun: error: n0: task 0: Terminated\n")
    found = concluded(lead, Evidence(ends.TERMINATED, []), [])
    assert (found["end"], found["evidence"], found["excluded_nodes"]) == (ends.TERMINATED, [line], [])
