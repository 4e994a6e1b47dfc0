"""When a segment's step is its last."""

import json
from pathlib import Path

from dsv4kit.plugin.stop_watch import Watch
from dsv4kit.run.directory import AttemptDir


def test_the_target_is_the_last_step(tmp_path: Path) -> None:
    watch = Watch(target=4, stop_file=None, deadline=None)
    assert watch.reason_to_stop(3, now=0) is None
    assert watch.reason_to_stop(4, now=1) == "segment done"


def test_a_resume_beyond_the_target_does_not_run_on(tmp_path: Path) -> None:
    assert Watch(target=4, stop_file=None, deadline=None).reason_to_stop(5, now=0) == "segment done"


def test_a_request_is_met_at_the_next_boundary(tmp_path: Path) -> None:
    watch = Watch(target=99, stop_file=tmp_path / "STOP", deadline=None)
    assert watch.reason_to_stop(1, now=0) is None
    (tmp_path / "STOP").touch()
    assert watch.reason_to_stop(2, now=1) == "stop requested"


def test_the_next_step_must_end_before_the_limit_with_its_save() -> None:
    watch = Watch(target=None, stop_file=None, deadline=1000)
    watch.saved(50)
    assert watch.reason_to_stop(1, now=100) is None  # nothing is known yet about a step's time
    assert watch.reason_to_stop(2, now=400) is None  # 300 s a step, 100 s for two saves: 800 s at the latest
    assert watch.reason_to_stop(3, now=700) == "time limit: 300 s left, 400 s needed"


def test_one_slow_step_is_forgotten_after_three_more() -> None:
    watch = Watch(target=None, stop_file=None, deadline=10_250)
    for step, now in enumerate(
        [0, 5000, 5100, 5200, 5300], start=1
    ):  # remembered, 5000 s more would be too late at 5300
        assert watch.reason_to_stop(step, now) is None


def test_the_plan_of_the_attempt_and_slurms_end_time_are_what_counts(tmp_path: Path) -> None:
    attempt = tmp_path / "segments" / "0001" / "attempt-0"
    attempt.mkdir(parents=True)
    (attempt / "plan.json").write_text(json.dumps({"start": 4, "target": 8}))
    watch = Watch.of_attempt(AttemptDir(attempt), "1000")
    assert watch.reason_to_stop(7, now=0) is None
    assert watch.reason_to_stop(8, now=1) == "segment done"
    (attempt.parent / "STOP").touch()
    assert Watch.of_attempt(AttemptDir(attempt), None).reason_to_stop(5, now=0) == "stop requested"
