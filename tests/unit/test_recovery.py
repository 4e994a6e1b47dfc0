"""What a fault cost, as `status` tells it."""

from pathlib import Path

import pytest

from dsv4kit.run import ends, metrics, phases, recovery
from dsv4kit.run.directory import RunDir
from dsv4kit.run.files import append_json
from dsv4kit.run.outcome import CONTINUE, Outcome, save
from dsv4kit.run.phases import Mark


@pytest.mark.parametrize(("end", "told"), [(ends.KILLED, True), (ends.COMPLETED, False), (ends.CANCELLED, False)])
def test_the_time_from_a_fault_to_the_next_finished_step(tmp_path: Path, end: str, told: bool) -> None:
    segment = RunDir(tmp_path).segment(1)
    attempt = segment.attempt(0)
    attempt.path.mkdir(parents=True)
    append_json(attempt.phases_file, {"phase": phases.END, "time": 1000.0})
    append_json(attempt.metrics_file, {"step": 21, "data": {metrics.GLOBAL_STEP: 21}})
    save(Outcome(1, 0, "7", 0, 40, 20, end, CONTINUE, "", ended=1003.0), segment)
    line = recovery.told(attempt, [Mark(phases.STEPS, 1048.0)], start=20, now=1095.0)
    assert (line is not None) == told
    if line:
        assert line.startswith(f"fault ({ends.KILLED}) at ")
        assert line.endswith("training again after 48 s, next step after 95 s, 1 step lost")


def test_only_attempts_before_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number in (0, 1, 2):
        run.segment(1).attempt(number).path.mkdir(parents=True)
    assert run.attempts_before(run.segment(1).attempt(1)) == [run.segment(1).attempt(0)]
    assert run.attempts_before(RunDir(tmp_path / "other").segment(1).attempt(0)) == []
