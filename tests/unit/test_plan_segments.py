"""How many steps a segment holds, when to save, and what of it is training."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import BUILT_IN, PRO_H100

from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted.segments import Timing, daly_s, duration_s, kept_share, segment_plan, steps_within, young_s

H100 = Timing(steady_s=688, first_s=2585, setup_s=900, save_s=600, tail_s=300)
GB200 = Timing(steady_s=966, first_s=1991, setup_s=900, save_s=600, tail_s=300)
HOUR = 3600


@pytest.mark.parametrize(
    ("timing", "hours", "steps", "useful"),
    [(H100, 4, 14, 0.67), (H100, 8, 33, 0.79), (GB200, 4, 11, 0.74), (GB200, 8, 25, 0.84)],
)
def test_steps_of_a_segment_with_a_cold_cache(timing, hours, steps, useful):
    assert steps_within(hours * HOUR, 10, timing) == steps
    assert steps * timing.steady_s / (hours * HOUR) == pytest.approx(useful, abs=0.01)


@pytest.mark.parametrize(("timing", "steps"), [(H100, 17), (GB200, 12)])
def test_a_warm_cache_makes_room_for_more(timing, steps):
    warm = timing._replace(first_s=timing.steady_s)
    assert steps_within(4 * HOUR, 10, warm) == steps


@given(
    st.floats(1, 5000),
    st.floats(0, 5000),
    st.floats(0, 3000),
    st.floats(0, 3000),
    st.integers(1, 50),
    st.floats(0, 1e6),
)
def test_one_step_more_would_not_fit(steady, extra, setup, save, save_freq, limit):
    timing = Timing(steady, steady + extra, setup, save, 300)
    steps = steps_within(limit, save_freq, timing)
    if steps:
        assert duration_s(steps, save_freq, timing) <= limit - 300 + 1e-6
    assert duration_s(steps + 1, save_freq, timing) > limit - 300 - 1e-6


@pytest.mark.parametrize(
    ("mtbf_h", "save_s", "young_h"), [(99, 120, 2.6), (99, 1800, 10), (58, 600, 4.4), (29, 1800, 5.4)]
)
def test_young(mtbf_h, save_s, young_h):
    assert young_s(save_s, mtbf_h * HOUR) / HOUR == pytest.approx(young_h, abs=0.06)


def test_daly_is_shorter_than_young_by_about_the_save():
    young, daly = young_s(600, 58 * HOUR), daly_s(600, 58 * HOUR)
    assert young - 600 < daly < young
    assert daly_s(10 * HOUR, 1 * HOUR) == HOUR


def run(**changes):
    values = {
        "timing": H100,
        "limit_s": 4 * HOUR,
        "total_steps": 1000,
        "segment_steps": 40,
        "save_freq": 10,
        "nodes": 64,
        "failures_per_node_day": 6.5e-3,
    }
    return segment_plan(**{**values, **changes})


def test_segments_of_a_run():
    plan = run()
    assert (plan.steps, plan.segments) == (14, 72)
    assert plan.mtbf_h == pytest.approx(57.7, abs=0.1)
    assert 0 < plan.goodput < plan.useful < 1
    assert plan.node_hours == pytest.approx(64 * 1000 * 688 / 3600 / plan.goodput)


def test_a_segment_is_no_longer_than_asked_for_or_than_the_run():
    assert run(limit_s=48 * HOUR).steps == 40
    assert run(limit_s=48 * HOUR, total_steps=5).steps == 5
    assert run(limit_s=48 * HOUR, total_steps=5).segments == 1


def test_where_not_one_step_fits_the_verdict_is_no():
    assert run(limit_s=HOUR).steps == 0
    plan = evaluate(PRO_H100._replace(schedule=PRO_H100.schedule._replace(time_limit_s=HOUR)), BUILT_IN)
    assert plan.verdict.verdict == "no"
    assert "not one step fits" in plan.verdict.reasons[0]


def test_more_failures_less_goodput():
    assert run(failures_per_node_day=0.1).goodput < run().goodput
    assert 0 < run(failures_per_node_day=1).goodput < 0.1
    assert run(failures_per_node_day=1e3).goodput == 0


def test_goodput_of_thousands_of_nodes_is_what_a_simulation_gives():
    """Where a tenth of the time between saves is a failure's, halves of intervals no longer add up."""
    random.seed(1)
    mtbf, between, restart = 3600.0, 2400.0, 900.0
    held = 0.0
    for _ in range(20_000):
        need = between
        while (failure := random.expovariate(1 / mtbf)) < need:
            held += failure
            need = restart + between
        held += need
    exact = kept_share(between, restart, mtbf)
    assert exact == pytest.approx(20_000 * between / held, rel=0.1)
