"""The small run that proves a site: suggested until one has succeeded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4kit.cli import main
from dsv4kit.config.loading import HERE, SITES, combinations, load_settings, load_site, load_yaml, names
from dsv4kit.launch.proxies import suggestion
from dsv4kit.run import metrics
from dsv4kit.run.directory import RunDir
from dsv4kit.run.files import append_json
from dsv4kit.run.outcome import CONTINUE, FINISHED, Outcome, save

SITE = load_site("example-gb200-pyxis")


def made(runs: Path, name: str, hardware: str = "gb200", model: str = "dsv4-pro-4l", recipe: str = "grpo") -> Path:
    """A run that has finished on SITE."""
    run = runs / name
    settings = load_settings(hardware, model, recipe).settings
    run.mkdir(parents=True)
    (run / "run.yaml").write_text(yaml.safe_dump({"settings": settings.model_dump(), "site": SITE.model_dump()}))
    ended(run, CONTINUE, segment=1)
    ended(run, FINISHED, segment=2)
    agreed(run, 0.9995, 0.9992)
    return run


def ended(run: Path, following: str, segment: int) -> None:
    save(Outcome(segment, 0, "7", 0, 2, 2, "steps saved", following, ""), RunDir(run).segment(segment))


def agreed(run: Path, *values: float) -> None:
    """The steps of its one attempt, each with what rollout and actor agreed to."""
    metrics_file = RunDir(run).segment(2).attempt(0).metrics_file
    metrics_file.unlink(missing_ok=True)
    for step, value in enumerate(values, 1):
        append_json(metrics_file, {"step": step, "data": {metrics.GLOBAL_STEP: step, metrics.PEARSON: value}})


def changed(run: Path, *keys: str, value: object) -> None:
    tree: Any = yaml.safe_load((run / "run.yaml").read_text())
    here = tree
    for key in keys[:-1]:
        here = here[key]
    here[keys[-1]] = value
    (run / "run.yaml").write_text(yaml.safe_dump(tree))


def suggested(runs: Path, hardware: str = "gb200", model: str = "dsv4-pro", recipe: str = "grpo") -> str:
    return "\n".join(suggestion(load_settings(hardware, model, recipe).settings, SITE, runs, {}))


def test_the_command_of_the_proxy_is_suggested(tmp_path: Path) -> None:
    text = suggested(tmp_path / "none")
    assert "no run of four layers has succeeded on example-gb200-pyxis with this image" in text
    assert "\nmake submit HW=gb200 MODEL=dsv4-pro-4l NODES=4 MODEL_PATH=..." in text
    assert len(text.splitlines()) == 2


@pytest.mark.parametrize(
    "proven",
    [
        {},
        {"hardware": "gb300"},
        {"model": "dsv4-flash-4l"},
    ],
)
def test_a_proxy_that_succeeded_there_is_enough(tmp_path: Path, proven: dict[str, str]) -> None:
    made(tmp_path, "one", **proven)
    assert suggested(tmp_path) == ""


@pytest.mark.parametrize(
    "other",
    [
        {"hardware": "h100"},
        {"hardware": "b200"},
        {"model": "dsv4-pro"},
        {"model": "dsv4-flash-4l", "recipe": "sft"},
    ],
)
def test_one_of_another_kind_is_not(tmp_path: Path, other: dict[str, str]) -> None:
    made(tmp_path, "one", **other)
    assert suggested(tmp_path) != ""


def test_nor_one_elsewhere_with_another_image_unfinished_or_damaged(tmp_path: Path) -> None:
    changed(made(tmp_path, "elsewhere"), "site", "name", value="other")
    changed(made(tmp_path, "image"), "site", "container", "image", value="/other.sqsh")
    ended(made(tmp_path, "unfinished"), CONTINUE, segment=2)
    for number, text in enumerate(("", "name: dsv4-pro-4l", "[name: dsv4-pro-4l", "\0name: dsv4-pro-4l")):
        (made(tmp_path, f"damaged{number}") / "run.yaml").write_text(text)
    changed(made(tmp_path, "older"), "settings", "hardware", value={"name": "gb200"})
    assert suggested(tmp_path) != ""
    made(tmp_path, "good")
    assert suggested(tmp_path) == ""


@pytest.mark.parametrize("agreement", [(0.9995, 0.97), ()])
def test_nor_one_whose_rollout_and_actor_disagreed_or_never_said(tmp_path: Path, agreement: tuple[float, ...]) -> None:
    agreed(made(tmp_path, "one"), *agreement)
    assert suggested(tmp_path) != ""


def test_nothing_is_suggested_for_what_is_small_itself(tmp_path: Path) -> None:
    assert suggested(tmp_path, model="dsv4-pro-4l") == ""
    assert suggested(tmp_path, hardware="cpu", model="tiny") == ""


def test_every_full_profile_has_a_proxy_and_no_proxy_has_one(tmp_path: Path) -> None:
    proxies = {load_yaml(HERE / "models" / f"{name}.yaml")["model"].get("proxy") for name in names("models")} - {None}
    assert proxies == {"dsv4-pro-4l", "dsv4-flash-4l"}
    for name, parts in combinations().items():
        full = parts["hardware"] != "cpu" and parts["model"] not in proxies
        assert bool(suggested(tmp_path, **parts)) == full, name


def test_submit_says_it_with_what_the_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path / "runs"))
    site = tmp_path / "my site.yaml"
    site.write_text((SITES / "example-gb200-pyxis.yaml").read_text())
    words = ["submit", "--hw=gb200", "--model=dsv4-flash", "--recipe=sft", f"--site={site}", "--dry-run"]
    assert main.run(words) == 0
    said = f"make submit HW=gb200 MODEL=dsv4-flash-4l RECIPE=sft SITE='{site}' NODES=2 MODEL_PATH=..."
    assert said in capsys.readouterr().err
    made(tmp_path / "runs", "one", model="dsv4-flash-4l", recipe="sft")
    assert main.run(words) == 0
    assert "no run of four layers" not in capsys.readouterr().err
