"""Nodes that a run avoids: each once, with its reason, for a day, or until it is told to forget them."""

from pathlib import Path

from dsv4kit.run import exclusions
from dsv4kit.run.directory import RunDir
from dsv4kit.run.exclusions import EXPIRES_AFTER_S, Exclusion


def test_the_latest_word_on_each_node_counts_and_the_latest_node_comes_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert exclusions.active(run, 0) == []
    exclusions.add(run, [Exclusion(1, 1, "a", "old"), Exclusion(2, 1, "b", "r"), Exclusion(3, 2, "a", "new")])
    assert [(one.node, one.reason) for one in exclusions.active(run, 4)] == [("a", "new"), ("b", "r")]


def test_a_node_may_be_used_again_after_a_day(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    exclusions.add(run, [Exclusion(0, 1, "a", "r"), Exclusion(100, 1, "b", "r")])
    assert [one.node for one in exclusions.active(run, EXPIRES_AFTER_S + 50)] == ["b"]


def test_what_was_forgotten_stays_in_the_file_and_counts_no_longer(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    exclusions.add(run, [Exclusion(1, 1, "a", "r")])
    exclusions.forget(run, 2)
    assert exclusions.active(run, 3) == []
    exclusions.add(run, [Exclusion(4, 2, "b", "r")])
    assert [one.node for one in exclusions.active(run, 5)] == ["b"]
    assert len(run.exclusions_file.read_text().splitlines()) == 3


def test_damaged_lines_and_those_of_another_version_do_no_harm(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.exclusions_file.write_text(
        '{"time": 1\n[]\n{"node": "x"}\n{"time": "1", "segment": 1, "node": "a", "reason": 3}\n{"ti'
    )
    assert [(one.node, one.reason) for one in exclusions.active(run, 2)] == [("a", "3")]
