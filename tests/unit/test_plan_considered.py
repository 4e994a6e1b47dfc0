"""Every key of verl's is in a formula, of no weight, or named under the verdict; every lever the kit sets counts."""

from __future__ import annotations

import argparse
import re

import pytest
from plan_cases import BUILT_IN, FLASH, GB200, GB300, H100, PRO_GB200, PRO_H100, flash_sft

from dsv4kit.cli import plan as cli
from dsv4kit.cli.selection import selection
from dsv4kit.config.loading import combinations, load_settings
from dsv4kit.errors import UserError
from dsv4kit.plan.considered import TABLE, answer, not_considered
from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted import geometry as geo
from dsv4kit.plan.counted.inputs import Training
from dsv4kit.plan.counted.step_time import transfer_s
from dsv4kit.plan.from_settings import question
from dsv4kit.verl_keys import overrides
from dsv4kit.verl_keys.compose import Tree
from dsv4kit.yaml_text import parse

# What a key is called that is about memory or time; no pattern for a whole group of keys may answer for those.
WEIGHTY = re.compile(r"offload|parallel_size|granularity|dtype|batch_size|ppo_epochs$|quantization$|bypass_mode")
# Groups of things that are off, each by a key of its own.
ELSEWHERE = (
    *("critic.", "reward", "distillation.", "actor_rollout_ref.ref."),
    *("actor_rollout_ref.model.lora.", "model.lora.", "trainer.v1."),
)
TREES = (("ppo_trainer", ("model_engine=megatron",)), ("sft_trainer_engine", ("engine=megatron", "optim=megatron")))


def plan(asked):
    return evaluate(asked, BUILT_IN)


def tree_keys(name, choices):
    tree = Tree(name)
    tree._choices = list(choices)
    keys = tree.keys()
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


@pytest.mark.parametrize(("name", "choices"), TREES)
def test_every_key_of_verls_tree_has_an_answer(name, choices):
    assert [key for key in tree_keys(name, choices) if answer(key) is None] == []


@pytest.mark.parametrize(("name", "choices"), TREES)
def test_a_key_about_memory_or_time_has_an_answer_of_its_own(name, choices):
    table = parse(TABLE.read_text())
    written = {key for kind in table.values() for key in kind}
    patterns = [p for p in written if "*" in p and not p.endswith((".*", "config.*"))]
    loose = [
        key
        for key in tree_keys(name, choices)
        if WEIGHTY.search(key) and not key.startswith(ELSEWHERE) and key not in written
        if not any(re.fullmatch(re.escape(p).replace(r"\*", ".*"), key) for p in patterns)
    ]
    assert loose == []


@pytest.mark.parametrize("profile", [n for n in combinations() if not n.endswith("cpu")])
def test_the_profiles_set_nothing_that_is_not_considered(profile):
    settings = load_settings(**combinations()[profile]).settings
    asked = question(settings)
    told = overrides.build(
        settings, run_name="r", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/k", layout=asked.layout
    )
    assert [key for key in told if answer(key) is None] == []
    assert asked.not_considered == ()


def test_what_is_set_and_in_no_formula_is_said():
    found = list(not_considered({"critic.enable": True, "trainer.val_before_train": False, "data.shuffle": True}))
    assert found == ["critic.enable (a critic, another model)"]
    assert list(not_considered({"actor_rollout_ref.rollout.engine_kwargs": {"vllm": {"block_size": 256}}})) == [
        "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size (an argument of vLLM's own)"
    ]


def asked_with(*words):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    parser.set_defaults(verb="plan")
    return question(selection(parser.parse_args(words)).resolved.settings)


ACTOR = "--verl=actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("word", "changed"),
    [
        ("--set=engine.full_recompute=false", {"training": {"recompute": False}}),
        (f"{ACTOR}.use_kl_loss=True", {"training": {"reference": True}}),
        ("--verl=algorithm.use_kl_in_reward=True", {"training": {"reference": True}}),
        (f"{ACTOR}.ppo_epochs=3", {"training": {"epochs": 3}}),
        (f"{ACTOR}.ppo_mini_batch_size=2", {"training": {"updates": 4}}),
        ("--verl=trainer.test_freq=5", {"training": {"validate_every": 5}}),
        ("--set=data.mean_response_length=1000", {"work": {"mean_response_tokens": 1000}}),
        ("--set=rollout.max_num_seqs=2", {"rollout": {"max_sequences": 2}}),
    ],
)
def test_a_setting_reaches_the_question(word, changed):
    asked = asked_with("--hw=h100", word)
    for part, values in changed.items():
        for name, value in values.items():
            assert getattr(getattr(asked, part), name) == value


def test_fixed_micro_batches_are_counted_in_sequences():
    fixed = asked_with(
        "--hw=h100",
        f"{ACTOR}.use_dynamic_bsz=False",
        "--verl=actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    )
    assert fixed.work.micro_batch_tokens == 2 * 6144


def test_without_recomputation_activations_are_kept():
    """Counted by hand: about 186 of 185 GiB on GB200's stage 1, 111 of 80 on H100's stage 0."""
    kept = Training(recompute=False)
    assert plan(PRO_GB200._replace(layout=None, training=kept)).memory.stages[1].training_gib == pytest.approx(
        186, rel=0.04
    )
    h100 = plan(PRO_H100._replace(training=kept))
    assert h100.memory.stages[0].training_gib == pytest.approx(111, rel=0.04)
    assert h100.verdict.verdict == "no"
    assert h100.step.update_s < plan(PRO_H100).step.update_s


def test_a_reference_policy_is_another_set_of_weights_and_another_forward_pass():
    with_reference, without = (plan(PRO_H100._replace(training=Training(reference=r))) for r in (True, False))
    assert with_reference.step.log_probs_s == pytest.approx(2 * without.step.log_probs_s)
    more = with_reference.memory.fullest_node.physical_gb - without.memory.fullest_node.physical_gb
    assert more == pytest.approx(without.memory.fullest_node.pinned_weights_gb)
    on_gpu = PRO_H100.levers._replace(param_offload=False)
    one, two = (
        plan(PRO_H100._replace(levers=on_gpu, training=Training(reference=r))).memory.stages[0] for r in (False, True)
    )
    assert two.training_gib - one.training_gib == pytest.approx(one.weights_gib)


def test_epochs_and_updates_cost_time():
    once = plan(PRO_H100).step
    assert plan(PRO_H100._replace(training=Training(epochs=2))).step.update_s == pytest.approx(2 * once.update_s)
    assert plan(PRO_H100._replace(training=Training(updates=4))).step.optimizer_s > 3 * once.optimizer_s
    validating = plan(PRO_H100._replace(training=Training(validate_every=10))).step
    assert validating.validation_s == pytest.approx(once.generation_s / 10)


def test_virtual_stages_by_verls_own_key_are_refused():
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    parser.set_defaults(verb="plan")
    words = ("--hw=h100", f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2")
    with pytest.raises(UserError, match="virtual stages"):
        cli.run(parser.parse_args(words))


@pytest.mark.parametrize("asked", [PRO_H100, PRO_GB200])
def test_phases_are_coupled_with_vllms_share_of_the_gpu(asked):
    def at(share):
        return plan(asked._replace(rollout=asked.rollout._replace(utilization=share)))

    assert at(0.5).verdict.verdict in ("fit", "tight")
    assert at(1.0).verdict.verdict == "no"
    assert any("start-up check" in reason for reason in at(1.0).verdict.reasons)
    need = [{p.name: p.need_gib for p in at(share).memory.stages[0].phases}["rollout"] for share in (0.5, 0.6)]
    assert need[1] - need[0] == pytest.approx(0.1 * asked.hardware.hbm_gib)


def test_the_phases_of_a_step_and_what_need_is():
    for stage in plan(PRO_H100).memory.stages:
        assert [phase.name for phase in stage.phases] == ["load", "rollout", "refit", "log-probs", "update", "save"]
        assert stage.need_gib == max(phase.need_gib for phase in stage.phases)
        assert all(phase.low_gib <= phase.need_gib <= phase.high_gib for phase in stage.phases)


def test_the_stage_of_the_mtp_layer_holds_an_embedding_too():
    last = {
        mtp: plan(flash_sft(H100, 16, 16, mtp=mtp)._replace(layout=layout)).memory.stages[-1]
        for mtp, layout in ((True, "Et*3|(t*3|)*11(tt|)*3tmL"), (False, "Et*3|(t*3|)*11(tt|)*3tL"))
    }
    embedding = FLASH.vocab_size * FLASH.hidden_size
    more = last[True].share.dense - last[False].share.dense
    assert more == geo.mtp_dense_params(FLASH) + embedding


def test_generated_layouts_are_no_fuller_than_the_published_ones():
    for asked, published in (
        (flash_sft(GB300, 8, 4, mtp=True), "Et*11|t*11|t*11|t*10mL"),
        (flash_sft(GB300, 8, 4), "Et*11|t*11|t*11|t*10L"),
        (flash_sft(H100, 16, 16, mtp=True), "Et*3|(t*3|)*11(tt|)*3tmL"),
        (PRO_GB200, "Et*4|(t*4|)*12(t*3|)*2t*3L"),
        (PRO_H100, "Et*3|(tt|)*27(t|)*3tL"),
    ):
        own, theirs = plan(asked._replace(layout=None)), plan(asked._replace(layout=published))
        assert own.memory.training_gib <= theirs.memory.training_gib * 1.001
        assert own.step.steady_s <= theirs.step.steady_s * 1.001


def test_times_are_those_of_the_work():
    def of(asked):
        return plan(asked).step

    few, many = (PRO_H100._replace(work=PRO_H100.work._replace(sequences=n)) for n in (64, 8192))
    assert of(many).generation_s > 1.1 * of(few).generation_s
    assert 0.03 < of(many).mfu < 0.4
    assert of(few).mfu < 0.01
    shorter = PRO_H100._replace(work=PRO_H100.work._replace(sequences=8192, mean_response_tokens=1024))
    assert of(shorter).update_s < 0.7 * of(many).update_s
    four, five = (PRO_H100._replace(parallel=PRO_H100.parallel._replace(pipeline=n)) for n in (4, 5))
    assert transfer_s(five, BUILT_IN) == pytest.approx(transfer_s(four, BUILT_IN), rel=0.05)
    half = PRO_H100._replace(levers=PRO_H100.levers._replace(offload_fraction=0.5))
    assert of(half).optimizer_s < 0.7 * of(PRO_H100).optimizer_s


def test_sft_times_depend_on_hardware_and_layout():
    gb200, h100 = plan(flash_sft(GB200, 16, 8)).step, plan(flash_sft(H100, 8, 8)).step
    assert h100.steady_s > gb200.steady_s
    assert plan(flash_sft(GB200, 16, 4)).step.steady_s != pytest.approx(gb200.steady_s, rel=0.05)
