"""Each refusal, once: what was asked for, in the user's words, and why it cannot work."""

from __future__ import annotations

import pytest

from dsv4kit.config.loading import Override, combinations, load_settings, load_site
from dsv4kit.errors import UserError
from dsv4kit.feasibility.case import Case
from dsv4kit.feasibility.refusals import refusals
from dsv4kit.verl_keys import overrides

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def setting(key: str, value: object) -> Override:
    return Override(key, value, f"SET {key}")


def raw(key: str, value: object) -> Override:
    return Override(f"verl.{key}", value, f"VERL {key}")


def problems(profile: str, *changes: Override) -> list[str]:
    chosen = combinations()[profile]
    resolved = load_settings(chosen["hardware"], chosen["model"], chosen["recipe"], changes)
    case = Case(resolved.settings, resolved.sources, load_site("sandbox"))
    return [refusal.line for refusal in refusals(case)]


# A schedule that a resume can go on in, its length left to verl.
COSINE = [
    setting("checkpoint.contents", ["model", "optimizer", "extra"]),
    raw(f"{ACTOR}.optim.lr_decay_style", "cosine"),
    raw(f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler", True),
]


@pytest.mark.parametrize(
    ("profile", "changes", "expected"),
    [
        (
            "pro-grpo-h100",
            [Override("schedule.nodes", "48", "NODES=48")],
            "NODES=48: pro-grpo-h100 needs a multiple of 32 (PP32 x EP8 and rollout replicas of 64 GPUs on nodes of 8"
            " GPUs); nearest: 32 and 64",
        ),
        ("pro-grpo-gb200", [Override("schedule.nodes", "100", "NODES=100")], "nearest: 64 and 128"),
        ("pro-grpo-gb200", [Override("schedule.nodes", "8", "NODES=8")], "nearest: 64"),
        (
            "pro-grpo-h100",
            [Override("schedule.nodes", "96", "NODES=96")],
            "24 data-parallel ranks cannot share a mini-batch of 8 prompts x 8 samples; 6 or 9 prompts would do",
        ),
        ("pro-grpo-h100", [Override("schedule.nodes", "96", "NODES=96")], "or NODES=64 or 128"),
        ("flash-sft-h100", [setting("data.train_batch_size", 100)], "nearest: 96 or 104"),
        (
            "pro-grpo-h100",
            [setting("parallel.rollout.expert_parallel_size", 32)],
            "SET parallel.rollout.expert_parallel_size=32: verl wants the rollout's EP to be 1 or TP x DP = 64",
        ),
        ("pro-grpo-h100", [setting("rollout.tensor_model_parallel_size", 3)], "1, 2, 4, 8 do"),
        (
            "pro-grpo-h100",
            [Override("kernels.moe_backend", "deep_gemm", "ROLLOUT_MOE_BACKEND=deep_gemm")],
            "ROLLOUT_MOE_BACKEND=deep_gemm: fails on h100 at load_model",
        ),
        (
            "pro-grpo-gb200",
            [Override("kernels.moe_backend", "deep_gemm", "ROLLOUT_MOE_BACKEND=deep_gemm")],
            "died in vLLM's profiling run at 10,240 batched tokens",
        ),
        (
            "pro-grpo-h100",
            [
                Override("kernels.moe_backend", "none", "ROLLOUT_MOE_BACKEND=none"),
                setting("engine.verl", "main-2026-10"),
            ],
            "ROLLOUT_MOE_BACKEND=none: leaves verl main-2026-10 its default, deep_gemm, which fails on h100",
        ),
        ("pro-grpo-h100", [raw(f"{ACTOR}.checkpoint.async_save", True)], "breaks with megatron-core 0.19"),
        ("flash-sft-h100", [raw("checkpoint.async_save", True)], "breaks with megatron-core 0.19"),
        ("flash-sft-h100", [setting("kernels.dsa_fusion", True)], "from compute capability 10.0 on, h100 has 9.0"),
        (
            "flash-sft-h200",
            [raw("engine.override_transformer_config.apply_dsa_kernel_fusion", True)],
            "from compute capability 10.0 on",
        ),
        (
            "pro-grpo-h100",
            [raw(f"{ACTOR}.optim.lr_decay_style", "cosine")],
            "only a constant learning rate survives a resume without the optimizer",
        ),
        ("pro-grpo-h100", [raw(f"{ACTOR}.optim.lr_warmup_steps", 10)], "only a constant learning rate"),
        (
            "flash-sft-h100",
            [raw("optim.use_checkpoint_opt_param_scheduler", False)],
            "use_checkpoint_opt_param_scheduler=True",
        ),
        (
            "pro-grpo-h100",
            [raw(f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size", 2)],
            "know no virtual stages",
        ),
        (
            "pro-grpo-h100",
            [raw(f"{ACTOR}.checkpoint.load_contents", ["model"])],
            "a resume loads exactly what the run saved",
        ),
        (
            "pro-grpo-h100",
            [*COSINE],
            f"VERL={ACTOR}.optim.lr_decay_steps=",
        ),
        (
            "flash-sft-gb300",
            [Override("optimizer.offload_fraction", "0.5", "OPTIMIZER_OFFLOAD_FRACTION=0.5")],
            "OPTIMIZER_OFFLOAD_FRACTION=0.5: does nothing while Adam runs on the GPU",
        ),
        ("pro-grpo-h100", [setting("optimizer.gpu_state_bytes", 2)], "fp32 and bf16 only"),
        (
            "pro-grpo-h100",
            [raw(f"{ACTOR}.optim.override_optimizer_config.exp_avg_dtype", "bf16")],
            f"verl's own key is {ACTOR}.optim.exp_avg_dtype",
        ),
        (
            "grpo-tiny-cpu",
            [Override("rollout.router_replay", "R3", "ROUTER_REPLAY_MODE=R3")],
            "only verl's Megatron engine replays routes",
        ),
        (
            "pro-grpo-h100",
            [setting("rollout.router_replay", "R2"), raw("algorithm.rollout_correction.bypass_mode", True)],
            "R2 records routes in the log-prob pass",
        ),
        ("pro-grpo-h100", [raw("data.filter_overlong_prompts", True)], "DeepSeek-V4 has none"),
        ("pro-grpo-h100", [raw(f"{ROLLOUT}.log_prob_use_dynamic_bsz", False)], "must equal"),
        ("pro-grpo-h100", [raw(f"{ROLLOUT}.full_determinism", True)], "every advantage 0"),
        ("pro-grpo-h100", [raw("actor_rollout_ref.nccl_timeout", 3600)], "has no effect, no code reads it"),
        ("pro-grpo-h100", [setting("parallel.actor.micro_batch_tokens", 4096)], "holds no sample of 6144 tokens"),
        ("pro-grpo-h100", [setting("data.train_batch_size", 4)], "smaller than ppo_mini_batch_size = 8"),
    ],
)
def test_a_refusal_says_what_and_why(profile: str, changes: list[Override], expected: str) -> None:
    found = problems(profile, *changes)
    assert any(expected in text for text in found), found
    assert all("\n" not in text for text in found)


@pytest.mark.parametrize("profile", sorted(combinations()))
def test_no_profile_breaks_a_rule(profile: str) -> None:
    assert problems(profile) == []


@pytest.mark.parametrize(
    ("profile", "changes"),
    [
        ("pro-grpo-h100", [Override("schedule.nodes", "128", "NODES=128")]),
        ("pro-grpo-gb200", [Override("schedule.nodes", "128", "NODES=128")]),
        ("pro-grpo-h100", [Override("kernels.moe_backend", "none", "ROLLOUT_MOE_BACKEND=none")]),
        (
            "pro-grpo-gb200",
            [setting("kernels.moe_backend", "deep_gemm"), setting("parallel.rollout.max_num_batched_tokens", 4096)],
        ),
        ("pro-grpo-h100", [setting("parallel.rollout.expert_parallel_size", 1)]),
        ("flash-sft-gb300", [setting("kernels.dsa_fusion", True)]),
        (
            "flash-sft-h100",
            [
                raw("optim.lr_decay_style", "cosine"),
                raw("optim.use_checkpoint_opt_param_scheduler", True),
                raw("optim.lr_decay_steps", 120),
            ],
        ),
    ],
)
def test_what_works_is_let_through(profile: str, changes: list[Override]) -> None:
    assert problems(profile, *changes) == []


@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_save_freq_that_never_saves(value: str) -> None:
    with pytest.raises(UserError, match=f"SAVE_FREQ={value}: .*verl never saves below 1, not even the last step"):
        load_settings("h100", "dsv4-pro", "grpo", [Override("schedule.save_freq", value, f"SAVE_FREQ={value}")])


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("trainer.total_epochs", "as many epochs as steps"),
        ("trainer.logger", "LOGGER"),
        (f"{ACTOR}.megatron.pipeline_model_parallel_size", "SET=parallel.actor.pipeline_parallel_size=..."),
        (f"{ROLLOUT}.gpu_memory_utilization", "SET=parallel.rollout.gpu_memory_utilization=..."),
    ],
)
def test_a_raw_key_that_plan_and_checks_would_not_see_is_refused(key: str, instead: str) -> None:
    settings = load_settings("h100", "dsv4-pro", "grpo", [raw(key, 1)]).settings
    with pytest.raises(UserError, match="the kit sets this key itself, from ") as error:
        overrides.build(settings, run_name="r", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/k", layout="x")
    assert instead in str(error.value)


def test_an_unknown_verl_is_refused() -> None:
    found = problems("pro-grpo-h100", setting("engine.verl", "0.9.2"))[0]
    assert "engine.verl='0.9.2': unknown; known: 0.9.1" in found
    assert "did you mean '0.9.1'" in found
