"""Metrics as verl's file logger writes them, and as a kill leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kit.run import metrics
from dsv4kit.run.metrics import StepMetrics, differing, last_metrics, last_step, merge, non_timing, read_metrics

TRAINED = {metrics.GLOBAL_STEP: 1.0, metrics.REWARD: 0.5}


def line(step: int, **data: float | None) -> str:
    return json.dumps({"step": step, "data": {name.replace("__", "/"): value for name, value in data.items()}}) + "\n"


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"".join(piece.encode() if isinstance(piece, str) else piece for piece in lines))
    return path


def test_an_attempt_is_read_step_by_step(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", line(1, critic__score__mean=0.25), line(2, critic__score__mean=None))
    assert read_metrics(path) == [StepMetrics(1, {metrics.REWARD: 0.25}), StepMetrics(2, {metrics.REWARD: None})]


def test_half_a_last_line_and_garbage_are_passed_over(tmp_path: Path) -> None:
    garbage = (
        "\n",
        "Traceback\n",
        "[1]\n",
        '{"step": 2}\n',
        '{"step": "3", "data": {}}\n',
        '{"step": -1, "data": {}}\n',
    )
    odd = (b"\xff\xfe\n", b"\0" * 100 + b"\n", '{"step": true, "data": {}}\n', "[" * 100_000 + "\n")
    path = write(tmp_path / "m.jsonl", line(1, x=1), *garbage, *odd, line(2, x=2), line(3, x=3)[:-6])
    assert [record.step for record in read_metrics(path)] == [1, 2]
    assert last_step(path) == 2


def test_a_whole_line_without_its_end_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", line(1, x=1), line(2, x=2).rstrip("\n"))
    assert last_step(path) == 2
    assert len(read_metrics(path)) == 2


def test_a_file_that_is_not_there_yet_has_no_steps(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "m.jsonl") == []
    assert last_metrics(tmp_path / "m.jsonl") is None
    assert last_step(write(tmp_path / "empty.jsonl")) is None


def test_values_that_are_no_numbers_are_left_out_and_not_a_number_is_none(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl", '{"step": 1, "data": {"a": "text", "b": [1], "c": NaN, "d": Infinity, "e": true}}\n'
    )
    assert read_metrics(path)[0].data == {"c": None, "d": None, "e": True}


def test_two_lines_of_one_step_are_put_together(tmp_path: Path) -> None:
    """SFT logs the validation loss of a step on a line of its own."""
    path = write(tmp_path / "m.jsonl", line(4, train__loss=1.0), line(5, train__loss=2.0), line(5, val__loss=3.0))
    assert last_metrics(path) == StepMetrics(5, {metrics.SFT_LOSS: 2.0, "val/loss": 3.0})
    assert read_metrics(path)[-1] == last_metrics(path)


def test_of_two_attempts_the_later_wins() -> None:
    """Steps after the last checkpoint are trained again by the next attempt."""
    first = [StepMetrics(step, {**TRAINED, metrics.REWARD: 0.1, "only/first": 1.0}) for step in (1, 2, 3)]
    second = [StepMetrics(step, {**TRAINED, metrics.REWARD: 0.2}) for step in (3, 4)]
    merged = merge([first, second])
    assert [(record.step, record.data[metrics.REWARD]) for record in merged] == [(1, 0.1), (2, 0.1), (3, 0.2), (4, 0.2)]
    assert "only/first" not in merged[2].data


def test_a_first_validation_after_a_resume_does_not_wipe_out_the_step() -> None:
    merged = merge([[StepMetrics(3, TRAINED)], [StepMetrics(3, {"val-core/gsm8k/acc": 0.7})]])
    assert merged == [StepMetrics(3, {**TRAINED, "val-core/gsm8k/acc": 0.7})]


def test_only_what_two_equal_trainings_share_is_compared() -> None:
    one = {
        metrics.REWARD: 0.5, "actor/grad_norm": None, metrics.STEP_TIME: 1.0, "perf/throughput": 2.0,
        "actor/perf/max_memory_allocated_gb": 3.0, "timing_per_token_ms/gen": 1.0, "train/mfu": 0.4,
    }  # fmt: skip
    assert non_timing(one) == {metrics.REWARD: 0.5, "actor/grad_norm": None}
    assert differing(one, {**one, metrics.STEP_TIME: 9.0}) == []
    assert differing(one, {**one, metrics.REWARD: 0.6, "actor/new": 1.0}) == ["actor/new", metrics.REWARD]


def test_the_end_of_a_large_file_is_found_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.jsonl", *[line(step, x=step) for step in range(200_000)])
    read = 0
    real = metrics._lines_from_end

    def counted(path: Path):  # type: ignore[no-untyped-def]
        nonlocal read
        for piece in real(path):
            read += len(piece)
            yield piece

    monkeypatch.setattr(metrics, "_lines_from_end", counted)
    assert last_step(path) == 199_999
    assert read < 1000


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(
        st.one_of(st.integers(0, 5).map(lambda s: line(s, x=s).encode()), st.binary(max_size=40)), max_size=12
    ),
    block=st.integers(1, 70),
    ended=st.booleans(),
)
def test_reading_from_the_end_sees_the_same_lines(lines: list[bytes], block: int, ended: bool) -> None:
    import tempfile

    content = b"".join(piece.rstrip(b"\n") + b"\n" for piece in lines)[: None if ended else -1]
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_BLOCK_BYTES", block)
        path = Path(name) / "m"
        path.write_bytes(content)
        assert list(metrics._lines_from_end(path)) == content.split(b"\n")[::-1]


def test_what_must_be_a_number_is_told_where_it_is_none() -> None:
    data = {
        "actor/pg_loss": None,
        "actor/grad_norm": float("inf"),
        "critic/score/mean": None,
        "train/loss": 1.0,
        "val-core/x/acc": None,
        "response_length/clip_ratio": None,
    }
    assert metrics.StepMetrics(3, data).not_numbers == ["actor/grad_norm", "actor/pg_loss", "critic/score/mean"]
    line = '{"step": 3, "data": {"training/global_step": 3, "actor/grad_norm": NaN, "train/loss": 1e999}}'
    found = metrics.parse_line(line)
    assert found is not None
    assert found.not_numbers == ["actor/grad_norm", "train/loss"]
