"""A report tells a run truthfully: its curve, cost, memory and faults, whatever its files hold."""

import json
import re
from pathlib import Path

import pytest
import report_runs

from dsv4kit.cli.main import run as dsv4kit
from dsv4kit.cli.report import written_at_the_end
from dsv4kit.errors import UserError
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.state import read_state
from dsv4kit.report import reward, summary, written
from dsv4kit.report.figures import figures
from dsv4kit.report.gather import RunFacts, gather
from dsv4kit.run import cost
from dsv4kit.run.directory import RunDir
from dsv4kit.run.files import write_json, write_text
from dsv4kit.run.metrics import StepMetrics


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    report_runs.make(root, "planted", fault_at=2, jump_at=3)
    return root


@pytest.fixture(scope="module")
def facts(root: Path) -> RunFacts:
    return gather(RunDir(root / "planted"))


def test_a_planted_fault_and_its_cost_are_told(facts: RunFacts) -> None:
    told = " ".join(summary.sentences(facts))
    assert "1 of 4 attempts ended by a fault: node lost." in told
    assert facts.lost_to.keys() == {"node lost"}
    # Half of ten steps of 690 s less the save between them, on four nodes.
    assert facts.hours[cost.LOST] == pytest.approx((690 * 5 - 60) * 4 / 3600)
    held = sum(row["node_hours"] for row in facts.attempts)
    assert sum(facts.hours.values()) == pytest.approx(held, abs=0.01)


def test_a_resume_whose_learning_rate_jumps_is_named(facts: RunFacts) -> None:
    assert [summary.changed(one["learning_rate"]) for one in facts.resumes] == [False, True, True]
    assert [one["again"] for one in facts.resumes] == [0, 5, 0]
    assert "2 of 3 resumes are not continuous" in " ".join(summary.sentences(facts))


def test_a_reward_that_is_no_number_is_counted_and_drawn_as_a_gap(facts: RunFacts) -> None:
    assert "The reward of 1 step was not a number." in list(summary.sentences(facts))
    learning = figures(facts)[0].spec
    assert learning
    assert learning["data"][0]["y"][2] is None


def test_nodes_of_stage_0_are_marked_and_compared_with_the_plan(facts: RunFacts) -> None:
    assert [(node.node, node.stage_0) for node in facts.memory.nodes][:3] == [
        ("node00", True),
        ("node01", True),
        ("node02", False),
    ]
    compared = {one["name"]: (one["predicted"], one["measured"]) for one in facts.compared}
    assert compared["host memory, stage 0"] == (pytest.approx(1030.0), pytest.approx(1000.0))
    assert compared["steady step"] == (690.0, 690.0)
    assert compared["node-hours of the run"][1] == pytest.approx(sum(facts.hours.values()))


def test_every_figure_is_one_that_plotly_takes(facts: RunFacts) -> None:
    graph = pytest.importorskip("plotly.graph_objects")
    drawn = figures(facts)
    assert [figure.key for figure in drawn if figure.spec is None] == []
    for figure in drawn:
        graph.Figure(figure.spec)  # raises for a key or a value it does not know


def test_the_page_needs_no_network_and_hostile_text_stays_text(facts: RunFacts) -> None:
    pytest.importorskip("plotly")
    page = written.as_html(facts)
    assert "<b>64</b>" not in page
    assert page.count("<script>alert(1)") == 0
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page
    ours = page[: page.index("<script>")] + page[page.rindex('"use strict"') :]
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", ours)
    assert "default-src 'none'" in page
    assert len(page) < 8_000_000


def test_markdown_and_json(root: Path, facts: RunFacts, capsys: pytest.CaptureFixture[str]) -> None:
    text = written.as_markdown(facts)
    assert "<script>" not in text.replace("\\<script\\>", "")
    content = json.loads(written.as_json(facts))
    assert content["steps"][2]["data"]["critic/score/mean"] is None
    assert content["hours"].keys() == facts.hours.keys()


def test_the_verb_writes_into_the_run_and_compares_two(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    monkeypatch.setenv("DSV4KIT_RUNS", str(root))
    report_runs.make(root, "other", segments=2, fault_at=None)
    assert dsv4kit(["report", "planted"]) == 0
    assert capsys.readouterr().out.strip() == str(root / "planted" / "report.html")
    assert (root / "planted" / "report.html").stat().st_size > 1_000_000
    assert dsv4kit(["report", "planted", "other", "--format", "md"]) == 0
    assert "| attempts | 4 | 2 |" in capsys.readouterr().out
    with pytest.raises(UserError, match="did you mean 'html'"):
        dsv4kit(["report", "planted", "--format", "htm"])


def test_the_first_look_after_the_end_writes_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    monkeypatch.setattr(Slurm, "states", lambda self, *a: {})
    run = report_runs.make(tmp_path, segments=2, fault_at=None)
    state = read_state(run, Slurm())
    assert state.over
    assert written_at_the_end(run, state) == str(run.report_file)
    assert written_at_the_end(run, state) is None


def test_a_run_without_any_metrics_and_a_damaged_one_are_shown_for_what_they_are(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "empty")
    write_json(run.node_spec_file, {"checkpoint_dir": str(run.checkpoints), "total_steps": 5})
    run.save_chain([])
    write_text(run.record_file, "\0")
    facts = gather(run)
    told = " ".join(summary.sentences(facts))
    assert "no metrics" in told
    assert "run.yaml" in told
    assert all(figure.spec is None and figure.missing for figure in figures(facts))
    assert "# empty" in written.as_markdown(facts)


def test_half_written_files_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path, segments=1, fault_at=None)
    attempt = run.segment(1).attempt(0)
    with attempt.metrics_file.open("ab") as file:
        file.write(b'\xff\xfe{"step": 99, "da')
    with (attempt.nodes / "node00.csv").open("a") as file:
        file.write("1790000000.0,12")
    (attempt.path / "outcome.json").write_text("{")
    facts = gather(run)
    assert len(facts.steps) == 10
    assert facts.attempts[0]["end"] is None


STEP = {
    "critic/score/mean": 0.5,
    "critic/score/min": -1.0,
    "critic/score/max": 1.0,
    "response_length/max": 100.0,
    "response_length/clip_ratio": 0.25,
    "response/aborted_ratio": 0.0,
}


def reading(**changes: float | None) -> reward.Reading:
    data = {**STEP, **{name.replace("__", "/"): value for name, value in changes.items()}}
    return reward.read([StepMetrics(1, data)], 100)


def test_the_score_is_read_as_truncation_only_where_it_may_be() -> None:
    assert (reading().asked, reading().holds, reading().truncated) == (1, 1, {1: 0.25})
    assert reading(critic__score__mean=0.1).holds == 0
    for changes, reason in (
        ({"response__aborted_ratio": 0.1}, "aborted"),
        ({"response_length__max": 99.0}, "no response reached the limit"),
        ({"critic__score__max": 2.0}, "not limited"),
        ({"critic__score__mean": None}, "not a number"),
        ({"response__aborted_ratio": None}, "did not log"),
    ):
        found = reading(**changes)  # type: ignore[arg-type]
        assert found.asked == 0
        assert reason in found.text
    assert reward.read([StepMetrics(1, STEP)], None).asked == 0


def test_prompt_lengths_play_no_part_in_reading_the_reward() -> None:
    assert reading(prompt_length__clip_ratio=0.9) == reading()
