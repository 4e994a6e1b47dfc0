"""What must hold for any split: shards sum to the whole, and more parallelism never costs memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import ALL_OFF_THE_GPU, BUILT_IN, FLASH, GB200, H100, PRO, PRO_GB200, PRO_H100

from dsv4kit.errors import UserError
from dsv4kit.plan.core import evaluate, memory_of
from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.checks import check
from dsv4kit.plan.counted.inputs import ActorSplit, Levers
from dsv4kit.plan.counted.shards import shares
from dsv4kit.plan.levers import memory_word
from dsv4kit.plan.search import hopeless

SPLITS = st.tuples(
    st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from([32, 64, 128])
)


def split(question, pipeline, expert, nodes):
    parallel = question.parallel._replace(pipeline=pipeline, expert=expert, nodes=nodes)
    return question._replace(parallel=parallel, layout=None)


def legal(question):
    try:
        check(question)
    except UserError:
        return False
    return True


@given(SPLITS, st.sampled_from([PRO, FLASH]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_shards_sum_to_the_whole(sizes, model, mtp):
    question = split(PRO_H100, *sizes)._replace(geometry=model, mtp=mtp)
    if not legal(question):
        return
    held, p = shares(question), question.parallel
    sums = geo.totals(model)
    whole = sums.with_mtp if mtp else sums.main
    # Megatron builds a second embedding beside the MTP layer, where that is not the stage of the first.
    whole += geo.embedding_params(model) * (mtp and p.pipeline > 1)
    assert sum(share.dense + share.expert * p.expert for share in held) == whole
    # Every parameter's optimizer state has one owner.
    assert sum(share.state * p.ranks_per_stage for share in held) == pytest.approx(whole)


@given(SPLITS, st.sampled_from([PRO_H100, PRO_GB200]))
@settings(max_examples=60, deadline=None)
def test_memory_falls_with_more_ep(sizes, question):
    small, large = split(question, *sizes), split(question, sizes[0], 2 * sizes[1], sizes[2])
    if not (legal(small) and legal(large)):
        return
    one, other = memory_of(small, BUILT_IN), memory_of(large, BUILT_IN)
    assert other.fullest_stage.need_gib <= one.fullest_stage.need_gib
    assert other.fullest_node.pageable_gb <= one.fullest_node.pageable_gb * 1.001


@given(SPLITS, st.sampled_from([PRO_H100, PRO_GB200]))
@settings(max_examples=60, deadline=None)
def test_static_gpu_memory_falls_with_more_pp(sizes, question):
    """Ranks per stage halve with it, so the dense optimizer share may grow; the weights of the fullest do not."""
    small, large = split(question, *sizes), split(question, 2 * sizes[0], *sizes[1:])
    if not (legal(small) and legal(large)):
        return
    one, other = (max(s.weights_gib for s in memory_of(q, BUILT_IN).stages) for q in (small, large))
    assert other <= one


@given(SPLITS, st.sampled_from([PRO_H100, PRO_GB200]), st.booleans(), st.booleans(), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_what_is_passed_over_unplanned_would_not_fit(sizes, question, precise, short, offload):
    nodes = sizes[2] // (8 if short else 1)
    asked = split(question, sizes[0], sizes[1], nodes)
    levers = asked.levers._replace(precision_aware=precise, offload_fraction=offload / 2, param_offload=not short)
    asked = asked._replace(levers=levers)
    if hopeless(asked) and legal(asked):
        assert memory_word(memory_of(asked, BUILT_IN), BUILT_IN) == "no"


@given(SPLITS)
@settings(max_examples=40, deadline=None)
def test_memory_falls_with_more_nodes(sizes):
    small = split(PRO_H100, *sizes)
    large = split(PRO_H100, *sizes[:2], 2 * sizes[2])
    if not legal(small):
        return
    one, other = memory_of(small, BUILT_IN), memory_of(large, BUILT_IN)
    assert other.fullest_stage.need_gib <= one.fullest_stage.need_gib
    assert other.fullest_node.physical_gb <= one.fullest_node.physical_gb


@given(st.floats(0, 1))
def test_offloading_moves_memory_from_the_gpu_to_the_host(fraction):
    moved = PRO_H100._replace(levers=PRO_H100.levers._replace(offload_fraction=fraction))
    all_there, here = memory_of(PRO_H100, BUILT_IN), memory_of(moved, BUILT_IN)
    assert here.fullest_stage.need_gib >= all_there.fullest_stage.need_gib - 1e-9
    assert here.fullest_node.physical_gb <= all_there.fullest_node.physical_gb + 1e-9


@pytest.mark.parametrize("question", [PRO_H100, PRO_GB200], ids=["h100", "gb200"])
def test_every_node_is_counted_once(question):
    assert sum(node.nodes for node in memory_of(question, BUILT_IN).nodes) == question.parallel.nodes
    assert sum(node.head for node in memory_of(question, BUILT_IN).nodes) == 1


def test_nodes_that_hold_two_stages():
    question = PRO_H100._replace(parallel=ActorSplit(16, 8, pipeline=32, expert=4), rollout=None)
    nodes = memory_of(question, BUILT_IN).nodes
    assert sum(node.nodes for node in nodes) == 16
    assert nodes[0].stages == (0, 1)


@pytest.mark.parametrize("hardware", [H100, GB200], ids=["h100", "gb200"])
def test_a_lever_never_hurts_both(hardware):
    """Each of the three levers of the guide takes memory off the GPU or off the host."""
    base = PRO_GB200._replace(hardware=hardware, levers=ALL_OFF_THE_GPU._replace(bf16_gradients=False))
    before = memory_of(base, BUILT_IN)
    for levers in (
        base.levers._replace(bf16_gradients=True),
        base.levers._replace(precision_aware=True),
        base.levers._replace(offload_fraction=0.5),
    ):
        after = memory_of(base._replace(levers=levers), BUILT_IN)
        assert (
            after.fullest_stage.need_gib < before.fullest_stage.need_gib
            or after.fullest_node.physical_gb < before.fullest_node.physical_gb
        )


def test_nothing_offloaded_leaves_only_processes_on_the_host():
    node = evaluate(PRO_GB200._replace(levers=Levers()), BUILT_IN).memory.nodes[-1]
    assert node.physical_gb == pytest.approx(60)
