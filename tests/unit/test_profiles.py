"""The profiles against the specification: sizes, layouts, memory, and what may differ between them."""

from __future__ import annotations

import json
from typing import Any

import layout_grammar
import pytest

from dsv4kit.cli import main
from dsv4kit.config.loading import HERE, Override, combinations, load_settings, load_site, load_yaml
from dsv4kit.config.paths import ROOT
from dsv4kit.config.schema import Settings
from dsv4kit.config.tree import leaves
from dsv4kit.errors import UserError
from dsv4kit.feasibility.case import Case
from dsv4kit.feasibility.node_memory import needed_gib
from dsv4kit.feasibility.refusals import refusals
from dsv4kit.feasibility.run_layout import pipeline_layout
from dsv4kit.feasibility.trainer_rules import node_unit
from dsv4kit.plan.core import Plan, evaluate
from dsv4kit.plan.counted.coefficients import built_in
from dsv4kit.plan.from_settings import question
from dsv4kit.verl_keys import overrides
from dsv4kit.verl_keys.pairs import data_parallel, is_sft, replica_gpus, world

PROFILES = combinations()
PLANNED = [name for name, chosen in PROFILES.items() if chosen["hardware"] != "cpu"]


def settings_of(name: str, **changes: object) -> Settings:
    chosen = PROFILES[name]
    extra = [Override(key.replace("__", "."), value, f"SET {key}") for key, value in changes.items()]
    return load_settings(chosen["hardware"], chosen["model"], chosen["recipe"], extra).settings


def pairs_of(settings: Settings) -> dict[str, Any]:
    return overrides.build(
        settings,
        run_name="r",
        model_path="/m",
        data_dir="/d",
        run_dir="/r",
        kit_dir="/k",
        layout=pipeline_layout(settings),
    )


def plan_of(settings: Settings) -> Plan:
    asked = question(settings)
    assert asked is not None
    return evaluate(asked, built_in())


@pytest.mark.parametrize("name", PLANNED)
def test_it_fits_by_the_planner_and_breaks_no_rule(name: str) -> None:
    settings = settings_of(name)
    plan = plan_of(settings)
    assert plan.verdict.verdict == "fit", plan.verdict.reasons
    assert list(refusals(Case(settings, {}, load_site("sandbox")))) == []
    # A segment's steps fit its time limit.
    assert plan.segment.fitting_steps >= settings.schedule.segment_steps
    # The preflight asks a node for what the planner counts on the fullest one, and for little more.
    wanted, node = needed_gib(settings, plan) * 2**30 / 1e9, plan.memory.fullest_node
    assert 1.04 * node.physical_gb < wanted < min(1.1 * node.physical_gb + 11, node.limit_gb)


@pytest.mark.parametrize("name", PLANNED)
def test_its_layout_is_legal_by_another_reading_of_the_notation(name: str) -> None:
    settings = settings_of(name)
    shape, actor = settings.model.geometry, settings.parallel.actor
    assert shape is not None
    layout = pipeline_layout(settings)
    if actor.pipeline_parallel_size == 1:
        assert layout is None
        return
    assert layout is not None
    assert not layout_grammar.problems(
        layout,
        pipeline=actor.pipeline_parallel_size,
        layers=shape.num_layers,
        hash_layers=min(shape.hash_layers, shape.num_layers),
        mtp=shape.mtp_layers if actor.mtp else 0,
    )


@pytest.mark.parametrize("model", ["pro-grpo-h100", "flash-grpo-h100"])
@pytest.mark.parametrize("mtp", [False, True])
def test_every_pp_has_a_legal_layout(model: str, mtp: bool) -> None:
    from dsv4kit.plan.counted.layout import LayoutRules, generate, max_pipeline, weights_for

    asked = question(settings_of(model))
    assert asked is not None
    shape = asked.geometry
    for pipeline in range(2, max_pipeline(shape.num_layers, shape.hash_layers) + 1):
        rules = LayoutRules(pipeline, shape.num_layers, shape.hash_layers, int(mtp))
        text = generate(rules, weights_for(shape, 8))
        problems = layout_grammar.problems(
            text, pipeline=pipeline, layers=shape.num_layers, hash_layers=shape.hash_layers, mtp=int(mtp)
        )
        assert not problems, (pipeline, text)


def test_a_layout_of_ones_own_is_taken_and_checked() -> None:
    own = "Et*4|(t*4|)*12(t*3|)*2t*3L"
    settings = settings_of("pro-grpo-gb200", parallel__actor__layout=own)
    assert pipeline_layout(settings) == own
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.pipeline_model_parallel_layout"
    assert pairs_of(settings)[key] == own


def sizes(name: str) -> tuple[int, ...]:
    settings = settings_of(name)
    actor = settings.parallel.actor
    return (
        settings.schedule.nodes,
        world(settings),
        actor.tensor_parallel_size,
        actor.pipeline_parallel_size,
        actor.expert_parallel_size,
    )


def test_p1_pro_on_h100() -> None:
    settings = settings_of("pro-grpo-h100")
    assert sizes("pro-grpo-h100") == (64, 512, 1, 32, 8)
    assert (settings.rollout.tensor_model_parallel_size, settings.parallel.rollout.data_parallel_size) == (8, 8)
    pairs = pairs_of(settings)
    assert pairs["actor_rollout_ref.rollout.expert_parallel_size"] == 64
    assert pairs["data.max_response_length"] == 4096
    assert pairs["actor_rollout_ref.actor.megatron.router_replay.mode"] == "R3"
    assert pairs["actor_rollout_ref.rollout.enable_rollout_routing_replay"] is True
    assert pairs["actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend"] == "marlin"
    assert node_unit(settings) == 32


def test_p2_pro_on_gb200() -> None:
    settings = settings_of("pro-grpo-gb200")
    assert sizes("pro-grpo-gb200") == (64, 256, 1, 16, 16)
    assert (settings.rollout.tensor_model_parallel_size, replica_gpus(settings)) == (1, 32)
    pairs = pairs_of(settings)
    assert pairs["actor_rollout_ref.rollout.expert_parallel_size"] == 32
    assert pairs["data.max_response_length"] == 8192
    assert pairs["actor_rollout_ref.actor.megatron.router_replay.mode"] == "R3"
    assert pairs["actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend"] == "marlin"
    assert node_unit(settings) == 64


# Hardware and size decide these, and nothing else (row P3).
MAY_DIFFER = (
    "megatron.pipeline_model_parallel_size",
    "megatron.expert_model_parallel_size",
    "megatron.override_transformer_config.pipeline_model_parallel_layout",
    "megatron.override_transformer_config.apply_dsa_kernel_fusion",
    "megatron.override_ddp_config.grad_reduce_in_fp32",
    "optim.use_precision_aware_optimizer",
    "optim.main_grads_dtype",
    "rollout.tensor_model_parallel_size",
    "rollout.data_parallel_size",
    "rollout.expert_parallel_size",
    "rollout.max_num_batched_tokens",
    "rollout.max_model_len",
    "rollout.max_num_seqs",
    "rollout.log_prob_max_token_len_per_gpu",
    "actor.ppo_max_token_len_per_gpu",
    "data.max_response_length",
    "reward_kwargs.max_resp_len",
    "overlong_buffer_cfg.len",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
)


@pytest.mark.parametrize(
    "name", [name for name, c in PROFILES.items() if c["recipe"] == "grpo" and c["model"] in ("dsv4-pro", "dsv4-flash")]
)
def test_p3_only_what_hardware_and_size_force_differs_from_flash(name: str) -> None:
    ours, flash = pairs_of(settings_of(name)), pairs_of(settings_of("flash-grpo-h100"))
    different = {key for key in ours.keys() | flash.keys() if ours.get(key) != flash.get(key)}
    assert all(key.endswith(MAY_DIFFER) for key in different), different


def test_p3_algorithm_data_and_reward_are_those_of_verls_script() -> None:
    pairs = pairs_of(settings_of("flash-grpo-h100"))
    wanted = {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 10240,
        "data.apply_chat_template_kwargs.enable_thinking": True,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.max_num_seqs": 1,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype": "fp8",
        "reward.reward_manager.name": "dapo",
        "reward.reward_kwargs.overlong_buffer_cfg.enable": False,
        "reward.reward_kwargs.max_resp_len": 10240,
    }
    assert {key: pairs[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", [name for name in PLANNED if "grpo" in name])
def test_p5_a_resume_asks_for_what_was_saved(name: str) -> None:
    pairs = pairs_of(settings_of(name))
    assert pairs["actor_rollout_ref.actor.checkpoint.save_contents"] == ["model", "extra"]
    # verl's load_contents refers to save_contents unless it is set.
    assert "actor_rollout_ref.actor.checkpoint.load_contents" not in pairs


@pytest.mark.parametrize("name", PLANNED)
def test_p10_rays_object_store_is_32_gib_and_dev_shm_has_room_for_it(name: str) -> None:
    settings = settings_of(name)
    assert settings.ray.object_store_gib == 32
    assert settings.hardware.min_shm_gib > 32


def test_f1_flash_on_h100_takes_the_rollout_that_fits() -> None:
    assert sizes("flash-grpo-h100") == (8, 64, 1, 8, 8)
    assert replica_gpus(settings_of("flash-grpo-h100")) == 8
    upstream = settings_of("flash-grpo-h100", parallel__rollout__data_parallel_size=4)
    assert "rollout" in plan_of(upstream).verdict.reasons[0]


def test_f2_context_parallelism_brings_its_arguments_and_only_then() -> None:
    own = "actor_rollout_ref.actor.megatron.override_transformer_config"
    names = ("cp_partition_mode", "sequence_packing_scheduler", "max_seqlen_per_dp_cp_rank")
    plain = pairs_of(settings_of("flash-grpo-h100"))
    assert not any(f"{own}.{name}" in plain for name in names)
    split = pairs_of(settings_of("flash-grpo-h100", parallel__actor__context_parallel_size=2, schedule__nodes=16))
    assert [split[f"{own}.{name}"] for name in names] == ["contiguous", "default_dynamic_cp", 6144]
    assert split["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == 6144


def test_s1_sft_of_flash() -> None:
    pairs = pairs_of(settings_of("flash-sft-h100"))
    own = "engine.override_transformer_config"
    wanted = {
        "engine": "megatron",
        "optim": "megatron",
        "engine.tensor_model_parallel_size": 1,
        "engine.use_mbridge": True,
        "engine.vanilla_mbridge": False,
        "engine.use_dist_checkpointing": False,
        "model.use_remove_padding": False,
        "engine.use_remove_padding": True,
        "optim.lr": 5e-6,
        "optim.min_lr": 5e-7,
        "optim.lr_decay_style": "cosine",
        "optim.lr_warmup_steps": 2,
        "optim.lr_decay_steps": 116,
        "optim.weight_decay": 0.1,
        "data.train_batch_size": 64,
        "data.max_length": 1024,
        "data.use_dynamic_bsz": False,
        "data.micro_batch_size_per_gpu": 1,
        "trainer.test_freq": -1,
        "model.mtp.enable": True,
        "model.mtp.enable_train": True,
        f"{own}.apply_rope_fusion": True,
        f"{own}.use_fused_mhc": False,
        f"{own}.recompute_granularity": "full",
        f"{own}.recompute_method": "uniform",
        f"{own}.recompute_num_layers": 1,
        "data.pad_mode": "no_padding",
        "checkpoint.save_contents": ["model", "optimizer", "extra"],
    }
    assert {key: pairs[key] for key in wanted} == wanted
    assert not any(key.startswith(("actor_rollout_ref", "ray_kwargs", "reward")) for key in pairs)


def test_s1_validates_after_each_epoch_where_there_is_a_file_for_it() -> None:
    settings = settings_of("flash-sft-h100", data__val_files=["/v.parquet"])
    assert pairs_of(settings)["trainer.test_freq"] == "after_each_epoch"


def test_s1_the_learning_rate_falls_over_the_whole_run() -> None:
    assert pairs_of(settings_of("flash-sft-h100", schedule__steps=232))["optim.lr_decay_steps"] == 232


def test_names_for_trackers_can_be_set() -> None:
    named = pairs_of(settings_of("pro-grpo-h100", tracking__project="v4", tracking__experiment="first"))
    assert (named["trainer.project_name"], named["trainer.experiment_name"]) == ("v4", "first")


def test_a_step_of_vllm_holds_one_longest_sequence_whatever_its_length() -> None:
    longer = pairs_of(settings_of("pro-grpo-gb200", data__max_response_length=4096))
    key = "actor_rollout_ref.rollout"
    assert (longer[f"{key}.max_num_batched_tokens"], longer[f"{key}.max_model_len"]) == (6144, 6144)
    assert pairs_of(settings_of("pro-grpo-gb200", rollout__max_model_len=9000))[f"{key}.max_model_len"] == 9000


def test_s2_sizes_of_sft() -> None:
    assert sizes("flash-sft-h100") == (16, 128, 1, 16, 8)
    assert sizes("flash-sft-gb300") == (8, 32, 1, 4, 8)
    small = settings_of("flash-sft-h100", parallel__actor__pipeline_parallel_size=4, schedule__nodes=4)
    assert plan_of(small).verdict.verdict == "no"


@pytest.mark.parametrize("name", PLANNED)
def test_s5_fused_sparse_attention_is_off_below_blackwell(name: str) -> None:
    settings = settings_of(name)
    old = (settings.hardware.sm_architecture or 0) < 100
    expected = not (old or is_sft(settings))
    assert settings.kernels.dsa_fusion is expected


@pytest.mark.parametrize("name", [name for name in PLANNED if "-4l-" in name])
def test_proxies_are_small_and_shaped_like_the_whole(name: str) -> None:
    settings = settings_of(name)
    whole = settings_of(name.replace("-4l", ""))
    assert settings.schedule.nodes <= 4
    assert settings.schedule.steps <= 4
    assert settings.model.geometry is not None
    assert whole.model.geometry is not None
    assert settings.model.geometry.num_layers == 4
    same = {"num_layers", "compress_ratios"}
    assert settings.model.geometry.model_dump(exclude=same) == whole.model.geometry.model_dump(exclude=same)
    assert settings.model.geometry.compress_ratios[:4] == whole.model.geometry.compress_ratios[:4]
    assert settings.checkpoint.contents == whole.checkpoint.contents
    assert data_parallel(settings) >= 1


@pytest.mark.parametrize("hardware", ["gb200", "gb300"])
def test_nvlink_between_trays_is_a_choice_written_down(hardware: str) -> None:
    env = load_settings(hardware, "dsv4-flash", "grpo").settings.env
    assert (env["NCCL_CUMEM_ENABLE"], env["NCCL_MNNVL_ENABLE"]) == ("1", "2")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in env


def test_environment_of_hopper() -> None:
    env = load_settings("h100", "dsv4-pro", "grpo").settings.env
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "NCCL_CUMEM_ENABLE" not in env
    assert env["NCCL_NVLS_ENABLE"] == "0"
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_every_number_of_a_base_or_profile_has_its_reason_above_it() -> None:
    """In the same block, without a blank line between; the number of nodes is what a profile is named for."""
    for path in [*(HERE / "bases").glob("*.yaml"), *(HERE / "profiles").glob("*.yaml")]:
        commented = False
        for line in path.read_text().splitlines():
            key, _, value = line.strip().partition(":")
            commented = bool(line.strip()) and (commented or line.strip().startswith("#"))
            if line.startswith(" ") and key != "nodes" and any(character.isdigit() for character in value):
                assert commented, f"{path.name}: {line}"


def test_profiles_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["profiles", "show", "pro-grpo-h100", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["parallel"]["actor"]["pipeline_parallel_size"] == 32
    assert (
        shown["sources"]["parallel.actor.pipeline_parallel_size"]
        == "dsv4kit/config/profiles/pro-grpo.yaml: hardware.h100"
    )
    assert shown["sources"]["rollout.router_replay"] == "dsv4kit/config/bases/dsv4-grpo.yaml"
    assert shown["sources"]["kernels.dsa_fusion"] == "dsv4kit/config/bases/hopper.yaml"
    assert shown["derived"] == {
        "pipeline_layout": "Et*3|(tt|)*27(t|)*3tL",
        "nodes_multiple_of": 32,
        "min_memory_gib": 1090.0,
    }


def test_profiles_list_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["profiles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(PROFILES)


def test_nothing_is_listed_twice() -> None:
    for name, combination in PROFILES.items():
        assert list(PROFILES.values()).count(combination) == 1
        assert settings_of(name).profile == name


def test_a_row_holds_only_what_differs_from_the_rest_of_its_table() -> None:
    for path in (HERE / "profiles").glob("*.yaml"):
        tree = load_yaml(path)
        rows = tree.pop("hardware")
        shared = dict(leaves({key: value for key, value in tree.items() if key not in ("for", "bases")}))
        for hardware, row in rows.items():
            for key, value in leaves(row):
                assert shared.get(key) != value, f"{path.name}: {hardware}: {key} stands above already"


def test_a_profile_says_what_it_is_of_the_nodes_that_are_asked_for() -> None:
    assert settings_of("pro-grpo-h100").description == "GRPO of dsv4-pro on 64 nodes of 8 H100"
    assert settings_of("pro-grpo-h100", schedule__nodes=32).description == "GRPO of dsv4-pro on 32 nodes of 8 H100"
    assert settings_of("sft-tiny-cpu").description == "SFT of tiny on 2 nodes without GPUs"
    assert settings_of("sft-tiny-cpu", description="mine").description == "mine"


def test_memory_of_a_node_is_said_by_a_setting_or_computed_and_never_more_than_it_has() -> None:
    own = settings_of("pro-grpo-h100", hardware__min_memory_gib=5)
    assert needed_gib(own, plan_of(own)) == 5
    full = settings_of(
        "pro-4l-grpo-gb200", parallel__actor__pipeline_parallel_size=2, parallel__actor__expert_parallel_size=8
    )
    plan = plan_of(full)
    assert plan.verdict.verdict == "no"
    assert needed_gib(full, plan) == plan.memory.fullest_node.limit_gb * 1e9 / 2**30
    with pytest.raises(UserError, match=r"hardware\.min_memory_gib: not set, and the planner cannot compute it"):
        needed_gib(full, None)


@pytest.mark.parametrize("hardware", ["gb200", "gb300"])
def test_a_second_proxy_has_the_pipeline_the_optimizer_and_the_length_of_the_full_profile(hardware: str) -> None:
    words = [("schedule.nodes", 8), ("parallel.actor.pipeline_parallel_size", 2), ("data.max_response_length", 8192)]
    words += [("optimizer.precision_aware", False)]
    overrides = [Override(key, value, "docs/profiles.md") for key, value in words]
    settings = load_settings(hardware, "dsv4-pro-4l", "grpo", overrides).settings
    assert plan_of(settings).verdict.verdict == "fit"
    assert list(refusals(Case(settings, {}, load_site("sandbox")))) == []
    text = (ROOT / "docs" / "profiles.md").read_text()
    assert all(f"{key}={str(value).lower()}" in text for key, value in words[1:])


@pytest.mark.parametrize(
    ("hardware", "changes", "named"),
    [
        ("h100", {}, None),
        ("h100", {"data.max_response_length": 8192}, "responses of 8192 on"),
        ("h100", {"checkpoint.dist_checkpoint_path": "/shards"}, "DIST_CKPT_PATH on"),
        ("h100", {"data.max_response_length": 8192, "checkpoint.dist_checkpoint_path": "/shards"}, "8192 and DIST"),
        ("h200", {"parallel.actor.expert_parallel_size": 8}, None),
        (
            "h100",
            {
                "data.max_response_length": 8192,
                "parallel.actor.expert_parallel_size": 16,
                "parallel.actor.pipeline_parallel_size": 16,
            },
            None,
        ),
    ],
)
def test_on_80_gb_long_responses_and_shards_name_ep16(
    hardware: str, changes: dict[str, object], named: str | None
) -> None:
    overrides = [Override(key, value, "test") for key, value in changes.items()]
    plan = plan_of(load_settings(hardware, "dsv4-pro", "grpo", overrides).settings)
    said = [line for line in plan.verdict.warnings if "upstream advises EP16" in line]
    assert bool(said) == (named is not None)
    assert named is None or named in said[0]
