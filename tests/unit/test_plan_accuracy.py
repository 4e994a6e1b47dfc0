"""The planner against the measured numbers of the published runs."""

from __future__ import annotations

import pytest
from plan_cases import (
    ALL_OFF_THE_GPU,
    BUILT_IN,
    FLASH,
    GB200,
    GB300,
    H100,
    H200,
    PRO,
    PRO_GB200,
    PRO_H100,
    first_layers,
    flash_sft,
)

from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted.checkpoint_size import checkpoint_size
from dsv4kit.plan.counted.host_memory import pinned_factor
from dsv4kit.plan.counted.inputs import ActorSplit, Levers, Question, RolloutSplit, Work
from dsv4kit.plan.counted.rollout import rollout_memory

ROLLOUT_8 = RolloutSplit(1, 8, 8)


def plan(question):
    return evaluate(question, BUILT_IN)


# GPU: the published peaks are the last stage's, as torch counts


def test_last_stage_peaks_as_published():
    assert plan(PRO_H100).memory.stages[-1].peak_gib == pytest.approx(26.2, rel=0.05)
    assert plan(PRO_GB200).memory.stages[-1].peak_gib == pytest.approx(63.8, rel=0.05)


def test_the_first_stage_needs_far_more_than_the_published_one():
    first, last = (plan(PRO_H100).memory.stages[i] for i in (0, -1))
    assert first.peak_gib == pytest.approx(56, abs=1)
    assert first.peak_gib > 2 * last.peak_gib


def test_pro_on_h100_at_response_8192_is_tight_with_ep8_and_fits_with_ep16():
    longer = PRO_H100._replace(work=Work(64, 2048, 8192, 10240))
    assert plan(longer).verdict.verdict == "tight"
    assert plan(longer._replace(parallel=longer.parallel._replace(expert=16))).verdict.verdict == "fit"


@pytest.mark.parametrize(
    ("levers", "last_stage"),
    [({}, 43.8), ({"precision_aware": True}, 25.6), ({"bf16_gradients": False}, 56.6)],
)
def test_only_one_setting_of_the_levers_explains_the_published_gb200_peak(levers, last_stage):
    """bf16 gradients and no precision-aware optimizer: 43.8 GiB static, 62.0 in the optimizer step."""
    stage = plan(PRO_GB200._replace(levers=ALL_OFF_THE_GPU._replace(**levers))).memory.stages[-1]
    assert stage.static_gib == pytest.approx(last_stage, abs=0.1)


# host: shown on H100 without pinned memory


def test_host_of_h100_as_published():
    nodes = plan(PRO_H100).memory.nodes
    shown = {node.stages[0]: node.reported_gb for node in nodes}
    assert shown[0] == pytest.approx(558, rel=0.05)
    assert max(node.reported_gb for node in nodes if 0 not in node.stages) == pytest.approx(409, rel=0.05)
    assert min(node.reported_gb for node in nodes if 0 not in node.stages) == pytest.approx(244, rel=0.05)
    assert next(node for node in nodes if 0 in node.stages).nodes == 2


def test_what_h100_really_holds_is_twice_what_was_shown():
    assert plan(PRO_H100).memory.nodes[0].physical_gb == pytest.approx(1106, abs=2)


def test_head_node_of_gb200_with_the_even_layout():
    head = plan(PRO_GB200).memory.nodes[0]
    assert head.head
    assert 790 <= head.physical_gb <= 930
    assert head.physical_gb == pytest.approx(929, rel=0.01)
    assert plan(PRO_GB200).verdict.verdict == "tight"


def test_the_balanced_layout_takes_170_gb_off_the_head_node():
    balanced = plan(PRO_GB200._replace(layout=None))
    assert balanced.memory.nodes[0].physical_gb == pytest.approx(756, abs=3)
    assert balanced.memory.fullest_node.physical_gb == pytest.approx(769, abs=3)
    assert balanced.verdict.verdict == "fit"


@pytest.mark.parametrize(
    ("levers", "nodes", "gigabytes"),
    [
        ({"precision_aware": True}, 64, 770),
        ({"precision_aware": True, "pinned_round_threshold_mb": 64}, 64, 683),
        ({}, 128, 614),
    ],
)
def test_levers_on_the_gb200_head_node(levers, nodes, gigabytes):
    question = PRO_GB200._replace(
        levers=ALL_OFF_THE_GPU._replace(**levers), parallel=PRO_GB200.parallel._replace(nodes=nodes)
    )
    assert plan(question).memory.nodes[0].physical_gb == pytest.approx(gigabytes, abs=2)


def test_pinned_experts_of_pro_waste_half_and_those_of_flash_nothing():
    assert pinned_factor(PRO, Levers()) == pytest.approx(1.524, abs=0.001)
    assert pinned_factor(FLASH, Levers()) == 1.0
    assert pinned_factor(PRO, Levers(pinned_round_threshold_mb=64)) == 1.0


@pytest.mark.parametrize(
    ("changes", "terabytes", "lossless"),
    [
        ({}, 0.851, False),
        ({"dist_checkpoint": True}, 3.146, False),
        ({"contents": ("model", "optimizer", "extra"), "dist_checkpoint": True}, 3.146 + 18.9, True),
    ],
)
def test_checkpoint_sizes_of_pro(changes, terabytes, lossless):
    size = checkpoint_size(PRO_H100._replace(**changes))
    assert size.size_gb / 1000 == pytest.approx(terabytes, rel=0.005)
    assert size.lossless is lossless
    assert size.note


def test_without_the_precision_aware_optimizer_masters_are_saved_twice():
    size = checkpoint_size(PRO_GB200._replace(contents=("optimizer",)))
    assert size.size_gb / 1000 == pytest.approx(25.2, rel=0.005)


def test_the_proxy_checkpoint_of_56_gb():
    shape = first_layers(PRO, 4)
    proxy = PRO_H100._replace(geometry=shape, layout=None, parallel=ActorSplit(1, 8, pipeline=1, expert=8))
    assert checkpoint_size(proxy).size_gb * 1e9 / 2**30 == pytest.approx(55.2, abs=0.1)


@pytest.mark.parametrize(
    ("model", "hardware", "rollout", "weights", "fits"),
    [
        (PRO, H100, RolloutSplit(8, 8, 64), 23.0, True),
        (PRO, H100, RolloutSplit(8, 4, 32), 35.9, False),
        (PRO, H100, RolloutSplit(8, 4, 32, utilization=0.55), 35.9, True),
        (PRO, GB200, RolloutSplit(1, 32, 32), 54.4, True),
        (FLASH, H100, RolloutSplit(1, 4, 4), 45.6, False),
        (FLASH, H100, RolloutSplit(1, 8, 8), 27.2, True),
        (FLASH, H200, RolloutSplit(1, 4, 4), 45.6, True),
    ],
)
def test_rollout_weights_and_whether_they_fit(model, hardware, rollout, weights, fits):
    memory = rollout_memory(model, hardware, rollout, PRO_H100.work, 512, BUILT_IN)
    assert memory.weights_gb == pytest.approx(weights, abs=0.1)
    assert memory.fits is fits


@pytest.mark.parametrize("mtp", [False, True])
def test_flash_sft_on_32_h100_runs_out_of_memory(mtp):
    assert plan(flash_sft(H100, 4, 4, mtp)).verdict.verdict == "no"


@pytest.mark.parametrize("mtp", [False, True])
def test_flash_sft_on_128_h100_fits_with_pp16_but_not_with_pp4(mtp):
    assert plan(flash_sft(H100, 16, 16, mtp)).verdict.verdict == "fit"
    assert plan(flash_sft(H100, 16, 4, mtp)).verdict.verdict == "no"


def test_flash_sft_on_32_gb300_fits_with_mtp_too():
    assert plan(flash_sft(GB300, 8, 4, mtp=True)).verdict.verdict == "fit"


def test_flash_sft_on_32_gb300_fits_and_cpu_offload_there_does_not():
    question = flash_sft(GB300, 8, 4)
    assert plan(question).verdict.verdict == "fit"
    assert plan(question).memory.fullest_stage.need_gib == pytest.approx(179, abs=2)
    offloaded = plan(question._replace(levers=Levers(cpu_offload=True, param_offload=True, optimizer_offload=True)))
    assert offloaded.verdict.verdict == "no"
    assert any("host" in reason for reason in offloaded.verdict.reasons)
    assert offloaded.memory.nodes[0].physical_gb == pytest.approx(1081, rel=0.01)


@pytest.mark.parametrize(
    ("levers", "verdict"), [({}, "no"), ({"precision_aware": True, "bf16_gradients": True}, "fit")]
)
def test_flash_grpo_on_8_nodes_of_h100_needs_the_levers(levers, verdict):
    question = Question(
        model="dsv4-flash",
        geometry=FLASH,
        hardware=H100,
        recipe="grpo",
        parallel=ActorSplit(8, 8, pipeline=8, expert=8),
        work=Work(sequences=512, prompt_tokens=2048, response_tokens=10240, micro_batch_tokens=12288),
        rollout=RolloutSplit(1, 8, 8),
        levers=Levers(cpu_offload=True, param_offload=True, optimizer_offload=True, **levers),
    )
    assert plan(question).verdict.verdict == verdict


def test_step_times_as_published():
    h100, gb200 = plan(PRO_H100).step, plan(PRO_GB200).step
    assert plan(PRO_H100).step_extrapolated == plan(PRO_GB200).step_extrapolated == ()
    for measured in (692, 684):
        assert h100.steady_s == pytest.approx(measured, rel=0.05)
    for measured in (960, 972):
        assert gb200.steady_s == pytest.approx(measured, rel=0.05)
    assert h100.first_s == pytest.approx(2585, rel=0.05)
    assert gb200.first_s == pytest.approx(1991, rel=0.05)


def test_the_parts_of_a_step_as_published():
    h100, gb200 = plan(PRO_H100).step, plan(PRO_GB200).step
    assert (h100.generation_s, h100.update_weights_s) == pytest.approx((280, 235), rel=0.02)
    assert (gb200.generation_s, gb200.update_weights_s) == pytest.approx((500, 251), rel=0.02)


def test_flash_sft_on_64_gb200_takes_what_nvidias_card_says():
    card = flash_sft(GB200, 16, 4, mtp=True)._replace(
        parallel=ActorSplit(16, 4, pipeline=4, expert=8, context=2),
        work=Work(128, 512, 512, 512),
        layout="Et*11|t*11|t*11|t*10mL",
    )
    assert plan(card).step.steady_s == pytest.approx(13.8, rel=0.02)
    assert plan(card).step_extrapolated == ()


def test_the_proxys_weight_update_as_published():
    proxy = PRO_H100._replace(
        geometry=first_layers(PRO, 4), layout=None, parallel=ActorSplit(2, 8, pipeline=1, expert=8), rollout=ROLLOUT_8
    )
    assert plan(proxy).step.update_weights_s == pytest.approx(8.3, rel=0.05)


def test_no_extrapolation_is_presented_as_knowledge():
    for changed in (
        PRO_H100._replace(parallel=PRO_H100.parallel._replace(nodes=128)),
        PRO_H100._replace(work=PRO_H100.work._replace(response_tokens=8192)),
        PRO_H100._replace(hardware=H200),
        PRO_GB200._replace(layout=None),
        PRO_H100._replace(levers=PRO_H100.levers._replace(offload_fraction=0.9)),
        flash_sft(GB300, 8, 4),
    ):
        assert plan(changed).step_extrapolated
    assert plan(flash_sft(H100, 16, 16)).memory_extrapolated
