"""Settings become verl's keys, and verl's own tree has the last word."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from dsv4kit.config.loading import Override, combinations, load_settings
from dsv4kit.errors import UserError
from dsv4kit.verl_keys import compose, overrides, rollout


def build(*changes: Override) -> dict[str, Any]:
    settings = load_settings("cpu", "tiny", "grpo", changes).settings
    return overrides.build(
        settings, run_name="r", model_path="/m", data_dir="/d", run_dir="/runs/r", kit_dir="/runs/r/kit"
    )


@pytest.fixture(scope="module")
def tree() -> compose.Tree:
    return compose.Tree("ppo_trainer")


def test_the_profile_is_accepted_by_verls_own_tree(tree: compose.Tree) -> None:
    rendered = tree.render(build())
    assert "trainer.nnodes=2" in rendered
    assert "++actor_rollout_ref.model.override_config.attn_implementation='sdpa'" in rendered


def test_every_value_arrives_in_the_composed_configuration_unchanged(tree: compose.Tree) -> None:
    hostile = '/data/it\'s $HOME `id` "x" |*\n é'
    pairs = build(
        Override("data.train_files", [hostile], "SET"), Override("verl.trainer.project_name", hostile, "VERL")
    )
    config = compose._compose("ppo_trainer", tree.render(pairs))
    for key, value in pairs.items():
        found = OmegaConf.select(config, key)
        assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value, key


def test_a_key_verl_does_not_know_is_refused_with_the_nearest(tree: compose.Tree) -> None:
    with pytest.raises(UserError, match=r"VERL x: verl's ppo_trainer has no key 'trainer.nodez' \(did you mean"):
        tree.render({"trainer.nodez": 1}, {"trainer.nodez": "VERL x"})


def test_a_new_key_below_an_open_dictionary_is_added(tree: compose.Tree) -> None:
    assert tree.render(build() | {"actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend": "marlin"})[-1].startswith(
        "++"
    )


def test_a_mandatory_key_left_out_is_named(tree: compose.Tree) -> None:
    pairs = build()
    del pairs["actor_rollout_ref.rollout.name"]
    with pytest.raises(UserError, match=r"needs a value for actor_rollout_ref\.rollout\.name"):
        tree.render(pairs)


@pytest.mark.parametrize(
    "key", ["trainer.total_training_steps", "trainer.resume_mode", "trainer.nnodes", "ray_kwargs.ray_init.num_cpus.x"]
)
def test_what_makes_the_chain_cannot_be_overridden(key: str) -> None:
    with pytest.raises(UserError, match="the kit sets this key itself"):
        build(Override(f"verl.{key}", 1, "VERL"))


def test_the_deterministic_mode_can_be_switched_off() -> None:
    key = "trainer.v1.sampler.custom_sampler.name"
    assert build()[key] == "OrderedReplayBuffer"
    assert key not in build(Override("deterministic", "False", "DETERMINISTIC=False"))


def test_checkpoints_go_into_the_run_unless_told_otherwise() -> None:
    assert build()["trainer.default_local_dir"] == "/runs/r/checkpoints"
    assert build(Override("checkpoint.directory", "/big", "SET"))["trainer.default_local_dir"] == "/big"


def test_a_model_and_data_of_ones_own_replace_those_the_kit_makes() -> None:
    assert build()["data.train_files"] == ["/d/train.parquet"]
    assert build(Override("data.train_files", ["/x.parquet"], "TRAIN_FILE"))["data.train_files"] == ["/x.parquet"]
    assert build(Override("model.path", "/weights", "MODEL_PATH"))["actor_rollout_ref.model.path"] == "/weights"


@pytest.mark.parametrize(
    ("recipe", "changes", "expected"),
    [
        ("grpo", {}, None),  # HW=cpu is deterministic: each sample has a seed of its own
        ("grpo", {"deterministic": False}, 42),
        ("grpo", {"deterministic": False, "verl": {"actor_rollout_ref.rollout.seed": 7}}, 7),
        ("sft", {"deterministic": False}, None),
    ],
)
def test_what_a_segments_rollout_seed_is_made_from(recipe: str, changes: dict[str, Any], expected: int | None) -> None:
    settings = load_settings("cpu", "tiny", recipe, [Override(key, value, "test") for key, value in changes.items()])
    assert rollout.seed(settings.settings) == expected


def test_a_rollout_seed_that_is_no_number_is_one_line() -> None:
    changes = [Override("deterministic", False, "t"), Override("verl", {"actor_rollout_ref.rollout.seed": "x"}, "t")]
    with pytest.raises(UserError, match=r"rollout\.seed: must be a whole number, not 'x'"):
        rollout.seed(load_settings("cpu", "tiny", "grpo", changes).settings)


@pytest.mark.parametrize("name", sorted(combinations()))
def test_the_indexers_loss_is_a_number_wherever_megatron_trains(name: str) -> None:
    """Megatron's own default is None, by which its unfused sparse attention multiplies in the first forward."""
    combination = combinations()[name]
    settings = load_settings(combination["hardware"], combination["model"], combination["recipe"]).settings
    pairs = overrides.build(settings, run_name="r", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/k")
    found = [value for key, value in pairs.items() if key.endswith("dsa_indexer_loss_coeff")]
    assert found == ([0.0] if settings.engine.backend == "megatron" else [])
