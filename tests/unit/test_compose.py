"""Group choices, open dictionaries, and what another verl than the wheel has or lacks."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4kit.config.loading import Override, load_settings
from dsv4kit.errors import UserError
from dsv4kit.verl_keys import compose, overrides
from dsv4kit.verl_keys.features import features_of, table


def rendered(hardware: str, model: str, recipe: str, *changes: tuple[str, object]) -> list[str]:
    own = [Override(key, value, f"SET {key}") for key, value in changes]
    settings = load_settings(hardware, model, recipe, own).settings
    pairs = overrides.build(
        settings, run_name="r", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/k", layout="EtL"
    )
    features = features_of(settings.engine.verl)
    return compose.Tree(settings.recipe.config_name, features.added, features.removed).render(pairs)


def test_group_choices_come_first_and_change_the_tree() -> None:
    assert rendered("h100", "dsv4-pro", "grpo")[0] == "model_engine=megatron"
    assert rendered("h100", "dsv4-flash", "sft")[:2] == ["engine=megatron", "optim=megatron"]
    with pytest.raises(UserError, match=r"no key 'actor_rollout_ref\.actor\.megatron\.param_offload'"):
        compose.Tree("ppo_trainer").render(
            {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.actor.megatron.param_offload": True}
        )


def test_a_group_choice_that_is_none_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^VERL: model_engine='megatrom': allowed: .*did you mean 'megatron'"):
        compose.Tree("ppo_trainer").render(
            {"model_engine": "megatrom", "actor_rollout_ref.rollout.name": "vllm"}, {"model_engine": "VERL"}
        )


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("actor_rollout_ref.actor.optim.lr", "abc", "a number, as 1e-06"),
        ("data.train_batch_size", "", "a number, as 1024"),
        ("trainer.val_before_train", "perhaps", "true or false, as True"),
    ],
)
def test_a_text_where_verl_takes_a_number_is_refused(key: str, value: str, wanted: str) -> None:
    with pytest.raises(UserError) as refused:
        compose.Tree("ppo_trainer").render({"actor_rollout_ref.rollout.name": "vllm", key: value}, {key: "VERL"})
    assert str(refused.value) == f"VERL: {key}={value!r}: verl takes {wanted}"


@pytest.mark.parametrize("key", ["actor_rollout_ref.actor", "actor_rollout_ref.model.override_config"])
def test_one_value_cannot_replace_a_group_of_keys(key: str) -> None:
    with pytest.raises(UserError, match=rf"^VERL: {key}=5: verl has a group of keys there \("):
        compose.Tree("ppo_trainer").render({"actor_rollout_ref.rollout.name": "vllm", key: 5}, {key: "VERL"})


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("ppo_trainer", []),
        ("ppo_trainer", ["model_engine=megatron"]),
        ("sft_trainer_engine", []),
        ("sft_trainer_engine", ["engine=megatron", "optim=megatron"]),
    ],
)
def test_what_the_tree_has_below_open_dictionaries_is_known(name: str, choices: list[str]) -> None:
    tree = compose.Tree(name)
    tree._choices = choices
    below = {
        key
        for key, value in tree.keys().items()
        if value != {} and any(key.startswith(f"{parent}.") for parent in compose.OPEN)
    }
    assert below <= compose.LISTED
    # ... and a key of vLLM's that is called like one of them is still added.
    assert compose._open("actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend")


def test_a_verl_with_a_switch_for_gradients_is_given_it() -> None:
    key = "actor_rollout_ref.actor.megatron.grad_offload=true"
    assert key in rendered("h100", "dsv4-pro", "grpo", ("engine.verl", "main-2026-08"))
    assert "grad_offload" not in "".join(rendered("h100", "dsv4-pro", "grpo"))
    assert "engine.grad_offload=false" in rendered("h100", "dsv4-flash", "sft", ("engine.verl", "main-2026-08"))


def test_a_key_the_images_verl_lacks_is_refused() -> None:
    changes: list[tuple[str, Any]] = [
        ("engine.verl", "main-2026-08"),
        ("verl.trainer.checkpoint_callback_class", "a.B"),
    ]
    with pytest.raises(UserError, match=r"the image's verl has no key 'trainer\.checkpoint_callback_class'"):
        rendered("h100", "dsv4-pro", "grpo", *changes)
    assert rendered("h100", "dsv4-pro", "grpo", changes[1])


def test_the_default_is_the_wheel_the_tree_comes_from() -> None:
    import importlib.metadata

    assert next(iter(table())) == importlib.metadata.version("verl")
    assert load_settings("h100", "dsv4-pro", "grpo").settings.engine.verl == importlib.metadata.version("verl")
    assert not features_of(importlib.metadata.version("verl")).added


def test_optimizer_levers_under_the_keys_verl_turns_into_types() -> None:
    levers = [("optimizer.gpu_state_bytes", 4), ("optimizer.offload_fraction", 0.5)]
    own = "actor_rollout_ref.actor.optim"
    found = rendered("h100", "dsv4-pro", "grpo", *levers)
    assert f"++{own}.override_optimizer_config.optimizer_offload_fraction=0.5" in found
    for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        assert f"{own}.{name}='bf16'" in found
    plain = rendered("gb200", "dsv4-pro", "grpo")
    assert "++actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32=false" in plain
    assert not any("dtype='bf16'" in line for line in plain)


def test_dist_ckpt_path_loads_and_saves_shards() -> None:
    own = "actor_rollout_ref.actor.megatron"
    found = rendered("h100", "dsv4-pro", "grpo", ("checkpoint.dist_checkpoint_path", "/shards"))
    assert f"{own}.use_dist_checkpointing=true" in found
    assert f"{own}.dist_checkpointing_path='/shards'" in found
    assert f"{own}.use_dist_checkpointing=false" in rendered("h100", "dsv4-pro", "grpo")
