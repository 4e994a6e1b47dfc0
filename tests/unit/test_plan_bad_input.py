"""Bad input: one line with the rule that is broken and its source."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import BUILT_IN, GB200, PRO_GB200, PRO_H100

from dsv4kit.errors import UserError
from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted.inputs import ActorSplit, Levers, RolloutSplit


def plan_or_refusal(question):
    try:
        return evaluate(question, BUILT_IN).verdict.verdict
    except UserError as error:
        return "one line" if str(error) and "\n" not in str(error) else str(error)


PARALLEL, WORK, ROLLOUT = PRO_H100.parallel, PRO_H100.work, PRO_H100.rollout


def message(question):
    with pytest.raises(UserError) as error:
        evaluate(question, BUILT_IN)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("value", [0, -1, 1.5])
@pytest.mark.parametrize(
    "make",
    [
        lambda v: PRO_H100._replace(parallel=PARALLEL._replace(nodes=v)),
        lambda v: PRO_H100._replace(parallel=PARALLEL._replace(pipeline=v)),
        lambda v: PRO_H100._replace(parallel=PARALLEL._replace(expert=v)),
        lambda v: PRO_H100._replace(parallel=PARALLEL._replace(context=v)),
        lambda v: PRO_H100._replace(work=WORK._replace(sequences=v)),
        lambda v: PRO_H100._replace(work=WORK._replace(micro_batch_tokens=v)),
        lambda v: PRO_H100._replace(rollout=ROLLOUT._replace(tensor=v)),
        lambda v: PRO_H100._replace(schedule=PRO_H100.schedule._replace(save_freq=v)),
    ],
)
def test_counts_are_whole_numbers_above_zero(make, value):
    assert "must be a whole number above 0" in message(make(value))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_amounts_are_above_zero(value):
    assert "must be a number above 0" in message(PRO_H100._replace(hardware=PRO_H100.hardware._replace(hbm_gib=value)))


@pytest.mark.parametrize(
    ("parallel", "words", "source"),
    [
        (PARALLEL._replace(expert=5), "EP=5: does not divide the 384 experts", "transformer_config.py"),
        (PARALLEL._replace(expert=32), "multiple of 128 nodes", "parallel_state.py"),
        (PARALLEL._replace(nodes=63), "not a multiple of PP x CP", "parallel_state.py"),
        (PARALLEL._replace(nodes=48), "PP=32 x EP=8 takes a multiple of 32 nodes", "parallel_state.py"),
        (PARALLEL._replace(pipeline=64), "allow at most 59", "transformer_config.py"),
        (PARALLEL._replace(tensor=2), "TP=1 only", "transformer_config.py"),
    ],
)
def test_actor(parallel, words, source):
    text = message(PRO_H100._replace(parallel=parallel))
    assert words in text
    assert source in text


def test_an_expert_group_larger_than_the_rack():
    wide = PRO_GB200._replace(layout=None, rollout=None, parallel=ActorSplit(96, 4, pipeline=1, expert=128))
    assert "NVLink domain of 72" in message(wide)


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        (RolloutSplit(8, 8, 8), "1 or TP x DP"),
        (RolloutSplit(3, 8, 24), "does not divide the 8 GPUs of a node"),
        (RolloutSplit(8, 5, 40), "does not divide the 384 experts"),
        (RolloutSplit(4, 3, 12), "neither whole nodes of 8 GPUs nor a share of one"),
        (RolloutSplit(8, 24, 192), "not a multiple of the rollout's TP x DP"),
        (RolloutSplit(8, 8, 64, utilization=0), "gpu_memory_utilization"),
        (RolloutSplit(8, 8, 64, utilization=math.nan), "gpu_memory_utilization"),
    ],
)
def test_rollout(rollout, words):
    assert words in message(PRO_H100._replace(rollout=rollout))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contents": ("model", "weights")}, "'weights': not one of model, optimizer, extra"),
        ({"contents": ()}, "empty"),
        ({"levers": Levers(offload_fraction=1.5)}, "between 0 and 1"),
        ({"levers": Levers(offload_fraction=math.nan)}, "between 0 and 1"),
        ({"levers": Levers(gpu_state_bytes=4)}, "only fp32 (8) without precision_aware"),
        ({"levers": Levers(pinned_round_threshold_mb=0)}, "above 0"),
        ({"layout": "Et*3|t*58mL"}, "2 stages for PP=32; one each"),
    ],
)
def test_the_rest(changes, words):
    assert words in message(PRO_H100._replace(**changes))


def test_fully_reshardable_checkpoints_of_pro_are_impossible():
    plan = evaluate(PRO_H100._replace(fully_reshardable=True), BUILT_IN)
    assert plan.verdict.verdict == "no"
    assert "fully_reshardable" in plan.verdict.reasons[0]


@given(
    nodes=st.integers(-2, 200),
    pipeline=st.integers(-1, 70),
    expert=st.integers(-1, 400),
    context=st.integers(0, 5),
    tensor=st.integers(0, 9),
    data=st.integers(0, 70),
)
@settings(max_examples=300, deadline=None)
def test_any_numbers_give_a_plan_or_one_line(nodes, pipeline, expert, context, tensor, data):
    question = PRO_GB200._replace(
        hardware=GB200,
        layout=None,
        parallel=ActorSplit(nodes, 4, 1, pipeline, expert, context),
        rollout=RolloutSplit(tensor, data, tensor * data),
    )
    assert plan_or_refusal(question) in ("fit", "tight", "no", "one line")
