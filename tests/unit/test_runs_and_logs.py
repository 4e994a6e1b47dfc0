"""`runs`, what `status` says besides the chain, and the parts of a log that `logs` is asked for."""

import json
import time
from pathlib import Path

import pytest
from test_state import Queue, Unreachable

from dsv4kit.cli.logs import LogFilter, find_logs
from dsv4kit.cli.main import run as dsv4kit
from dsv4kit.cli.runs import runs_table
from dsv4kit.cli.status import table
from dsv4kit.errors import UserError
from dsv4kit.launch.overview import overview, site_name
from dsv4kit.launch.pending import in_words
from dsv4kit.launch.progress import memory_peaks, progress_of
from dsv4kit.launch.slurm import JobState
from dsv4kit.launch.state import read_state
from dsv4kit.run import cost, ends, metrics, outcome
from dsv4kit.run.directory import ChainLink, RunDir
from dsv4kit.run.files import append_json, write_json, write_text
from dsv4kit.run.phases import Mark


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path))
    monkeypatch.setattr("dsv4kit.launch.slurm.Slurm.all_states", lambda self: {})
    monkeypatch.setattr("dsv4kit.launch.slurm.Slurm.states", lambda self, *a: {})
    return tmp_path


def made(root: Path, name: str, steps: int = 4, end: str = ends.COMPLETED) -> RunDir:
    """A run of 8 steps on 4 nodes, whose one segment trained so many, of which 4 are saved."""
    run = RunDir(root / name)
    spec = {"checkpoint_dir": str(run.checkpoints), "total_steps": 8, "segment_steps": 4, "nodes": 4}
    write_json(run.node_spec_file, spec)
    write_text(run.record_file, "run: x\nsubmitted: '2026-11-30T10:00:00+0000'\nsite:\n  name: far\nsettings: {}\n")
    write_text(run.checkpoints / "latest_checkpointed_iteration.txt", "4")
    run.save_chain([ChainLink(1, "11"), ChainLink(2, "12")])
    attempt = run.segment(1).attempt(0)
    write_json(attempt.course_file, {"start": 0, "target": 4})
    for phase, at in [("bring-up", 0.0), ("steps", 100.0), ("save", 400.0), ("steps", 500.0), ("end", 600.0)]:
        append_json(attempt.phases_file, {"phase": phase, "time": at})
    for step in range(1, steps + 1):
        data = {
            "training/global_step": step,
            "critic/score/mean": step / 10,
            "timing_s/step": 160.0 if step == 1 else 60,
        }
        append_json(attempt.metrics_file, {"step": step, "data": data | {metrics.PEARSON: 0.998}})
    ended = outcome.Outcome(1, 0, "11", 0, 4, 4, end, "continue", "", started=0.0, ended=610.0)
    outcome.save(ended, run.segment(1))
    return run


def test_a_run_in_one_line(root: Path) -> None:
    one = overview(made(root, "a"), {"12": JobState("RUNNING", "")}, now=1e9)
    assert (one.state, one.step, one.total_steps, one.saved_step) == ("running", 4, 8, 4)
    assert (one.step_s, one.eta_s, one.value) == (60.0, 240.0, 0.4)
    assert one.node_hours == pytest.approx(610 * 4 / 3600, abs=1e-3)
    assert one.node_hours_lost == 0.0
    assert "4/8" in runs_table([one], None)
    assert max(map(len, runs_table([one], 40).splitlines())) <= 40


def test_what_was_trained_after_the_last_save_is_lost(root: Path) -> None:
    one = overview(made(root, "a", end=ends.NODE_LOST), {}, now=1e9)
    assert one.node_hours_lost == pytest.approx(100 * 4 / 3600, abs=1e-3)


def test_where_the_time_of_an_attempt_goes() -> None:
    marks = [Mark("bring-up", 0), Mark("import", 10), Mark("steps", 50), Mark("save", 150), Mark("end", 170)]
    lost = outcome.Outcome(1, 0, "1", 0, 4, 0, ends.OUT_OF_GPU_MEMORY, "continue", "", ended=180)
    assert cost.spent(marks, [], lost, 0) == {"start": 50, "save": 20, "end": 10, "lost": 100}
    assert cost.spent(marks[:3], [], None, 70) == {"start": 50, "steps": 20}
    steps = [
        metrics.StepMetrics(n, {"training/global_step": n, "timing_s/step": s}) for n, s in [(1, 40), (2, 10), (3, 10)]
    ]
    assert cost.first_step_extra(steps) == 30
    assert cost.first_step_extra(steps[:2]) == 0


def test_runs_lists_filters_and_sorts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dsv4kit(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    made(root, "b")
    made(root, "a")
    write_text(root / "broken" / "run.yaml", "\0")
    assert dsv4kit(["runs", "--sort", "name", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["run"], one["state"]) for one in found] == [
        ("a", "incomplete"),
        ("b", "incomplete"),
        ("broken", "damaged"),
    ]
    assert dsv4kit(["runs", "--match", "b*", "--state", "damaged"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["broken", "damaged"]
    with pytest.raises(UserError, match="did you mean 'running'"):
        dsv4kit(["runs", "--state", "runing"])


def test_without_slurm_the_list_says_what_the_directories_tell(root: Path) -> None:
    one = overview(made(root, "a"), None, "Slurm is not reachable")
    assert (one.state, one.reason, one.saved_step) == ("unknown", "Slurm is not reachable", 4)


def test_the_site_is_found_without_reading_the_yaml(root: Path) -> None:
    assert site_name(made(root, "a")) == "far"
    assert site_name(RunDir(root / "none")) is None


def test_time_left_counts_the_starts_of_the_segments_to_come(root: Path) -> None:
    run = made(root, "a")
    state = read_state(run, Queue(j11="COMPLETED", j12="RUNNING"))
    assert state.progress.eta_s == 240.0
    assert state.progress.pearson == 0.998
    assert "step 4: 60.0 s a step, about 4 min left, queues apart" in table(state)
    merged = metrics.read_metrics(run.segment(1).attempt(0).metrics_file)
    assert progress_of(merged, [], 8, 2).eta_s == 240.0
    assert progress_of([], [], 8, 4).eta_s is None


def test_a_reward_that_is_no_number_is_named(root: Path) -> None:
    run = made(root, "a")
    with run.segment(1).attempt(0).metrics_file.open("a") as file:
        file.write('{"step": 5, "data": {"training/global_step": 5, "critic/score/mean": null}}\n{"half')
    state = read_state(run, Unreachable())
    assert state.progress.not_numbers == [5]
    assert "not a number: the reward of step 5" in table(state)


def test_status_fits_80_columns_and_text_stays_text(root: Path) -> None:
    run = made(root, "a")
    long = outcome.Outcome(1, 0, "11", 0, 4, 4, ends.UNKNOWN, "stop", "", evidence=["\x1b[2J" + "word " * 60], ended=1)
    outcome.save(long, run.segment(1))
    shown = table(read_state(run, Queue(j11="FAILED", j12="CANCELLED")), {}, {}, 80)
    directory = str(run.path)
    assert all(len(line) <= 80 for line in shown.splitlines() if directory not in line)
    assert "\x1b" not in shown
    assert "\\x1b[2J" in shown


def test_memory_peaks_are_those_of_the_fullest_node(root: Path) -> None:
    run = made(root, "a")
    assert memory_peaks(run) == {}
    head = "time,memory_used_mib,memory_available_mib,gpu0_used_mib,gpu1_used_mib\n"
    nodes = run.segment(1).attempt(0).nodes
    write_text(nodes / "n1.csv", head + "1.0,1024,5,2048,1024\n2.0,2048,5,1024,1024\n3.0,99")
    write_text(nodes / "n2.csv", head + "1.0,4096,5,0,0\n")
    peaks = memory_peaks(run)
    assert (peaks["host"].gib, peaks["host"].node) == (4.0, "n2")
    assert (peaks["GPU"].gib, peaks["GPU"].node) == (2.0, "n1")
    shown = table(read_state(run, Queue()), peaks, {"host": 5.0})
    assert "memory peaks: host 4 GiB on n2, 5 planned; GPU 2 GiB on n1" in shown


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("(Resources)", "waits until enough nodes are free (Resources)"),
        ("(QOSMaxNodePerUserLimit)", "a limit of the quality of service is reached (QOSMaxNodePerUserLimit)"),
        ("(AssocGrpNodeLimit)", "a limit of the account is reached (AssocGrpNodeLimit)"),
        ("(SomethingNew)", "SomethingNew"),
        ("", ""),
    ],
)
def test_why_a_job_waits_in_plain_words(reason: str, words: str) -> None:
    assert in_words(reason) == words


def test_parts_of_a_log(root: Path) -> None:
    run = made(root, "a")
    log = run.segment(1).attempt(0).driver_log
    write_text(
        log, "first\n2026-11-30 10:00:00,123 old\n  of old\n2026-11-30 12:00:00 \x1b[31mnew\x1b[0m fault\nrest\n"
    )
    assert LogFilter.asked("1", None, None).lines(log) == [b"rest\n"]
    assert LogFilter.asked(None, "new fault", None).lines(log) == [b"2026-11-30 12:00:00 \x1b[31mnew\x1b[0m fault\n"]
    assert len(LogFilter.asked(None, None, "2026-11-30T11:00").lines(log)) == 2
    write_text(log, "no times\n")
    with pytest.raises(UserError, match=r"no line of .* begins with a time"):
        LogFilter.asked(None, None, "10m").lines(log)
    for bad in ((("x", None, None)), (None, "(", None), (None, None, "soon")):
        with pytest.raises(UserError):
            LogFilter.asked(*bad)
    assert LogFilter.asked(None, None, "10m").since == pytest.approx(time.time() - 600, abs=5)


def test_logs_of_ray_and_of_one_node(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(root, "a")
    attempt = run.segment(1).attempt(0)
    for host in ("n1.far", "n2.far"):
        write_text(attempt.nodes / f"{host}.ray.log", f"ray of {host}\n")
    write_text(attempt.ray_logs("n1.far") / "raylet.out", "raylet\n")
    assert [path.name for path in find_logs(run, 1, "ray", None)] == ["n1.far.ray.log", "raylet.out", "n2.far.ray.log"]
    assert dsv4kit(["logs", "a", "--what", "ray", "--node", "n2.far", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["lines"] == ["ray of n2.far"]
    with pytest.raises(UserError, match=r"NODE='n3\.far': the nodes are n1\.far, n2\.far"):
        find_logs(run, 1, "ray", "n3.far")
    with pytest.raises(UserError, match="did you mean 'driver'"):
        find_logs(run, 1, "drivr", None)
