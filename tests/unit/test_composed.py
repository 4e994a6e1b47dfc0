"""What is kept of verl's composed tree: it says yes where Hydra would, nothing else, and no harm comes of it."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsv4kit.config.loading import load_settings
from dsv4kit.errors import UserError
from dsv4kit.verl_keys import compose, composed, overrides

PPO = ["model_engine=megatron"]
# The smaller tree: Hydra composes it four times as fast.
SFT = {"engine": "megatron", "optim": "megatron"}
REAL_COMPOSE = compose._compose
OPEN = "engine.override_transformer_config"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One for all tests here: what is in it was made by the code under test."""
    path = tmp_path_factory.getbasetemp() / "composed-cache"
    monkeypatch.setenv("DSV4KIT_CACHE", str(path))
    return path / "verl-config"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The override lists Hydra was given."""
    given: list[list[str]] = []

    def compose_(name: str, words: list[str]) -> Any:
        given.append(words)
        return _composed_by_hydra(compose._config_dir(), name, tuple(words))

    monkeypatch.setattr(compose, "_compose", compose_)
    return given


@functools.cache  # what is refused is not kept, and is composed again
def _composed_by_hydra(config_dir: Path, name: str, words: tuple[str, ...]) -> Any:
    return REAL_COMPOSE(name, list(words))


def verdict(pairs: dict[str, Any], name: str = "ppo_trainer", **of: Any) -> str | list[str]:
    try:
        return compose.Tree(name, **of).render(pairs)
    except UserError as error:
        return str(error)


def profile() -> dict[str, Any]:
    settings = load_settings("gb200", "dsv4-pro", "grpo").settings
    return overrides.build(
        settings, run_name="r", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/k", layout="EtL"
    )


def test_a_profile_needs_hydra_once_only(asked: list[list[str]], cache: Path) -> None:
    shutil.rmtree(cache, ignore_errors=True)
    first = verdict(profile())
    assert asked == [PPO]
    assert verdict(profile()) == first
    assert asked == [PPO]
    assert [path.suffix for path in cache.iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("change", "with_hydra"),
    [
        ({"trainer.project_name": "plain"}, False),
        ({f"{OPEN}.something_new": [1, "a", None]}, False),
        ({f"{OPEN}.a.b.c": 1}, False),
        ({"trainer.project_name": "${trainer.nnodes}"}, True),
        ({"trainer.project_name": ["a"]}, True),
        ({"trainer.nodez": 1}, True),
        ({"trainer.nodez.x": 1}, True),
        ({"trainer.nnodes.x": 1}, True),
        ({"trainer": 1}, True),
        ({"trainer": {"nnodes": 1}}, True),
        ({"trainer.nnodes": "many"}, True),
        ({"trainer": {"nodez": 1}}, True),
        ({"nothing": 1}, True),
        ({"trainer.project_name": "???"}, True),
        ({OPEN: {"x": 1}}, True),
        ({OPEN: 1, f"{OPEN}.x": 1}, True),
        ({f"{OPEN}.a": 1, f"{OPEN}.a.b": 1}, True),
        ({f"{OPEN}.recompute_method.x": 1}, True),
        ({f"{OPEN}.odd-name": 1}, True),
        ({"data@trainer.x": 1}, True),
        ({"~trainer.nnodes": None}, True),
        ({"engine": "megatrom"}, False),
    ],
)
def test_the_verdict_is_the_same_with_and_without(
    change: dict[str, Any], with_hydra: bool, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict(SFT, "sft_trainer_engine")
    asked.clear()
    with_cache = verdict({**SFT, **change}, "sft_trainer_engine")
    assert bool(asked) == with_hydra
    monkeypatch.setattr(compose.Tree, "_surely_composes", lambda *_: False)
    assert verdict({**SFT, **change}, "sft_trainer_engine") == with_cache


def test_a_mandatory_value_that_is_not_given_is_named_all_the_same() -> None:
    verdict(profile())
    assert "needs a value for actor_rollout_ref.rollout.name" in verdict({"model_engine": "megatron"})


@pytest.mark.parametrize("value", ["text", [1, 2], None])
def test_hydra_agrees_on_every_value_there_is(value: object) -> None:
    verdict(profile())
    known = composed.load(composed.path_of(compose._config_dir(), "ppo_trainer", PPO))
    assert known is not None
    pairs = {key: value for key in known.values if known._takes(key, value, {}, False)}
    assert len(pairs) > 0.9 * len(known.values - (known.numbers if isinstance(value, str) else set()))
    tree = compose.Tree("ppo_trainer")
    tree._choices = PPO
    tree._compose([*PPO, *(f"{key}={compose._quoted(key, value, {})}" for key in pairs)])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of verl's configuration that can be changed."""
    copy = tmp_path / "config"
    shutil.copytree(compose._config_dir(), copy)
    monkeypatch.setattr(compose, "_config_dir", lambda: copy)
    return copy


def test_another_file_makes_another_tree(own: Path, asked: list[list[str]]) -> None:
    pairs = {"trainer.max_ckpt_to_keep": 1}
    assert verdict(pairs, "sft_trainer_engine") == verdict(pairs, "sft_trainer_engine")
    assert len(asked) == 1
    path = own / "sft_trainer_engine.yaml"
    path.write_text(path.read_text().replace("max_ckpt_to_keep", "checkpoints_to_keep"))
    _composed_by_hydra.cache_clear()
    assert "has no key 'trainer.max_ckpt_to_keep'" in verdict(pairs, "sft_trainer_engine")
    assert verdict({"trainer.checkpoints_to_keep": 1}, "sft_trainer_engine") == ["trainer.checkpoints_to_keep=1"]


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    tree = {"a": {"b": 1, "c": "x/${.b}"}, "d": {}, "e": "???"}
    made = composed.of(tree, {**tree, "a": {"b": 1, "c": "x/1"}})
    assert made == composed.Composed(*map(frozenset, ({"a.b", "a.c", "e"}, {"a", "d"}, {"e"}, {"x", "b"}, {"a.b"})))
    composed.store(tmp_path / "deep" / "x.json", made)
    assert composed.load(tmp_path / "deep" / "x.json") == made
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"values": ["a"',
        "[1, 2]",
        "\0",
        "[" * 100_000,
        json.dumps(dict.fromkeys(composed.Composed._fields, 5)),
        json.dumps({name: [5] for name in composed.Composed._fields}),
    ],
)
def test_a_damaged_cache_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    assert composed.load(tmp_path / "x.json") is None
    (tmp_path / "x.json").write_bytes(b"\xff\xfe" + content.encode())
    assert composed.load(tmp_path / "x.json") is None
    assert composed.load(tmp_path) is None


@pytest.mark.parametrize("in_the_way", ["verl-config", "verl-config/{name}"])
def test_a_cache_that_cannot_be_used_is_no_hindrance(
    in_the_way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4KIT_CACHE", str(tmp_path / "cache"))
    path = composed.path_of(compose._config_dir(), "sft_trainer_engine", [])
    obstacle = tmp_path / "cache" / in_the_way.format(name=path.name)
    obstacle.parent.mkdir(parents=True)
    if obstacle == path:
        obstacle.mkdir()
    else:
        obstacle.write_text("")
    assert verdict({"trainer.nnodes": 2}, "sft_trainer_engine") == ["trainer.nnodes=2"]
    assert "has no key 'trainer.nodez'" in verdict({"trainer.nodez": 2}, "sft_trainer_engine")
    assert [found.name for found in obstacle.parent.iterdir()] == [obstacle.name]
