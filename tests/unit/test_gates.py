"""Gates: which metrics stop a run, which are only told, and which lines of a metrics file can upset neither."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4kit.config.loading import load_settings
from dsv4kit.run import ends, gates, metrics, outcome
from dsv4kit.run.metrics import StepMetrics

GATES: dict[str, Any] = {
    "mode": "act",
    "not_a_number": {"action": "stop_now", "in_a_row": 2},
    "agreement": {"action": "stop", "in_a_row": 1, "least": 0.999},
    "reward": {"action": "stop", "in_a_row": 2, "window": 4, "deviations": 6, "least_drop": 0.4},
    "length": {"action": "warn", "in_a_row": 2, "window": 4, "share": 0.25},
}


def step(number: int, **data: float | None) -> StepMetrics:
    names = {"pearson": metrics.PEARSON, "reward": metrics.REWARD, "length": metrics.RESPONSE_LENGTH}
    found = {metrics.GLOBAL_STEP: number} | {names.get(name, f"actor/{name}"): value for name, value in data.items()}
    return StepMetrics(number, found)


def curve(name: str, values: list[float | None]) -> list[StepMetrics]:
    return [step(number, **{name: value}) for number, value in enumerate(values, 1)]


def actions(steps: list[StepMetrics], **changes: Any) -> list[tuple[str, str]]:
    return [(found.gate, found.action) for found in gates.check({**GATES, **changes}, steps)]


def test_a_low_agreement_stops_and_says_where() -> None:
    (found,) = gates.check(GATES, curve("pearson", [0.9995, 0.97]))
    assert (found.action, found.step) == ("stop", 2)
    assert found.line == "rollout and actor agree to 0.9700 (Pearson), below 0.999, in step 2"


def test_the_limit_itself_is_enough() -> None:
    assert not actions(curve("pearson", [0.999]))


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_an_agreement_that_is_no_number_does_not_pass(value: float | None) -> None:
    assert actions(curve("pearson", [value])) == [("agreement", "stop")]


def test_one_bad_step_warns_and_two_in_a_row_stop() -> None:
    assert actions(curve("grad_norm", [1.0, None])) == [("not_a_number", "warn")]
    assert actions(curve("grad_norm", [1.0, None, None])) == [("not_a_number", "stop_now")]
    assert actions(curve("grad_norm", [None, 1.0, None])) == [("not_a_number", "warn")]


def test_a_reward_that_falls_off_stops_once_it_stays_there() -> None:
    usual: list[float | None] = [0.5, 0.55, 0.45, 0.5]
    assert actions(curve("reward", [*usual, 0.5, -0.9])) == [("reward", "warn")]
    assert actions(curve("reward", [*usual, -0.9, -0.9])) == [("reward", "stop")]
    assert not actions(curve("reward", [*usual, 0.4, 0.3]))
    assert not actions(curve("reward", [0.5, -0.9, -0.9]))  # nothing yet to compare with


def test_short_responses_are_told() -> None:
    assert actions(curve("length", [900, 1000, 1100, 1000, 100, 100])) == [("length", "warn")]
    assert not actions(curve("length", [900, 1000, 1100, 1000, 400, 400]))


def test_warn_only_warns_and_off_looks_at_nothing() -> None:
    bad = curve("pearson", [0.5])
    assert actions(bad, mode="warn") == [("agreement", "warn")]
    assert not actions(bad, mode="off")
    assert not gates.check({}, bad)  # a run of an older kit


def test_metrics_that_are_not_there_are_no_fault() -> None:
    assert not actions([step(number) for number in range(1, 9)])


def test_the_watch_tells_each_thing_once_and_a_repeated_step_counts_once() -> None:
    watch = gates.GateWatch(GATES)
    assert [one.action for one in watch.feed(step(1, grad_norm=None))] == ["warn"]
    assert watch.feed(step(1, grad_norm=None)) == []
    assert [one.action for one in watch.feed(step(2, grad_norm=None))] == ["stop_now"]
    assert watch.feed(step(3, grad_norm=None)) == []


def test_the_watch_goes_on_where_the_segment_before_ended() -> None:
    watch = gates.GateWatch(GATES, curve("reward", [0.5, 0.55, 0.45, 0.5, -0.9]))
    assert [one.action for one in watch.feed(step(6, reward=-0.9))] == ["stop"]


_NAMES = (metrics.PEARSON, metrics.REWARD, metrics.RESPONSE_LENGTH, metrics.SFT_LOSS, "actor/grad_norm")
_HOSTILE = (None, True, 0, -1, 1.5, 10**400, 1e308, -1e308, float("nan"), float("inf"), "nan", "", [], {"a": None})


@given(st.lists(st.tuples(st.integers(-2, 9), st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(_HOSTILE)))))
def test_no_line_upsets_it(lines: list[tuple[int, dict[str, Any]]]) -> None:
    watch = gates.GateWatch(GATES)
    for number, data in lines:
        if record := metrics.parse_line(json.dumps({"step": number, "data": data})):
            watch.feed(record)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 3, "data": {"actor/grad_norm": "nan"}}',
        '{"step": "3", "data": {"actor/grad_norm": null}}',
        '{"step": 3, "data": [null]}',
        '{"step": 3, "data": {"other": null}}',
    ],
)
def test_only_a_number_can_be_none(line: str) -> None:
    record = metrics.parse_line(line)
    assert record is None or not gates.check(GATES, [record])


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_whatever_is_not_a_number_is_seen(value: str) -> None:
    record = metrics.parse_line(f'{{"step": 3, "data": {{"train/loss": {value}}}}}')
    assert record is not None
    assert record.not_numbers == ["train/loss"]


def test_the_chain_ends_with_a_gate_also_where_steps_were_saved() -> None:
    following, reason = outcome.decide(ends.GATE, reached=20, total=40, start=0, history=[], limit=2)
    assert (following, reason) == (outcome.STOP, "stopped by a gate, at step 20 of 40")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.9995, 0.9992], "proved: Pearson at least 0.9992 in every step"),
        ([0.9995, 0.97], "not proved: Pearson 0.97 below 0.999 at step 2"),
        ([0.9995], "not proved yet"),
        ([0.9995, None], "not proved: no Pearson at step 2"),
        ([], "not proved: no step was trained"),
    ],
)
def test_a_proxy_is_proved_by_its_agreement(values: list[float | None], said: str) -> None:
    assert gates.proof(GATES, curve("pearson", values), 2) == said


@pytest.mark.parametrize(("hardware", "model", "least"), [("h100", "dsv4-pro", 0.998), ("h100", "dsv4-pro-4l", 0.999)])
def test_the_profiles_have_their_thresholds(hardware: str, model: str, least: float) -> None:
    found = load_settings(hardware, model, "grpo").settings.watch.gates
    assert found.agreement is not None
    assert found.agreement.least == least
    assert found.mode == "act"
