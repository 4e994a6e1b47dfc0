"""One list of refusals: `plan`, its search, its levers and `submit` answer alike, for the same site.

Random questions go through the verbs themselves; what ships is read once (`yaml_read_once`), else reading is all the
time there is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4kit import yaml_text
from dsv4kit.cli import main
from dsv4kit.config.loading import Override, combinations, hardware_defaults, load_settings, load_site
from dsv4kit.config.values import split_pair, split_words
from dsv4kit.errors import UserError
from dsv4kit.feasibility.case import Case
from dsv4kit.feasibility.refusals import OF_SETTINGS, RULES, allows, refusals
from dsv4kit.launch.segment_option import asks_for_segment
from dsv4kit.plan import node_counts
from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted.coefficients import built_in
from dsv4kit.plan.from_settings import question
from dsv4kit.plan.levers import levers
from dsv4kit.plan.of_settings import plan_of
from dsv4kit.plan.proposals import changes
from dsv4kit.plan.search import search

LARGE = sorted(name for name, chosen in combinations().items() if chosen["hardware"] != "cpu")
CHANGES: dict[str, list[Any]] = {
    "schedule.nodes": [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 1024],
    "parallel.actor.pipeline_parallel_size": [1, 2, 3, 4, 8, 16, 32, 64],
    "parallel.actor.expert_parallel_size": [1, 4, 5, 8, 16, 64, 128],
    "parallel.actor.context_parallel_size": [1, 2, 4],
    "parallel.actor.tensor_parallel_size": [1, 2],
    "parallel.actor.layout": ["null", "Ett", "Et*3|t*58L"],
    "parallel.actor.micro_batch_tokens": [1024, 6144, 10240, 10241],
    "parallel.actor.mtp": ["true"],
    "rollout.tensor_model_parallel_size": [1, 2, 3, 4, 8, 16],
    "parallel.rollout.data_parallel_size": [1, 4, 5, 8, 32, 64],
    "parallel.rollout.expert_parallel_size": [1, 7, 32, 64],
    "parallel.rollout.gpu_memory_utilization": [0.2, 0.6],
    "parallel.rollout.max_num_batched_tokens": [4096, 8192],
    "rollout.n": [1, 6, 8],
    "rollout.router_replay": ["R2", "R3", "disabled"],
    "data.train_batch_size": [4, 7, 8, 16, 64, 100],
    "optimizer.cpu_offload": ["true", "false"],
    "optimizer.offload_fraction": [0.5, 1],
    "optimizer.precision_aware": ["true", "false"],
    "optimizer.bf16_gradients": ["true", "false"],
    "optimizer.gpu_state_bytes": [2, 4, 8],
    "kernels.moe_backend": ["deep_gemm", "marlin", "none"],
    "kernels.dsa_fusion": ["true", "false"],
    "schedule.steps": [10, 999_999],
    "schedule.time": ["0:10:00"],
    "ray.object_store_gib": [300],
    "checkpoint.contents": ["[model,extra]", "[model,optimizer,extra]"],
    "env.PYTORCH_CUDA_ALLOC_CONF": ["expandable_segments:True"],
    "engine.verl": ["main-2026-10", "0.9.9"],
    "model.path": ["relative", "/none"],
    "reward.function_name": ["f", "${nope}"],
}
REFUSED = "as it stands this is refused: "
ASKED = st.tuples(
    st.sampled_from(LARGE),
    st.dictionaries(st.sampled_from(sorted(CHANGES)), st.integers(0, 99), max_size=4),
    st.sampled_from([None, None, "example-bare"]),
)


@pytest.fixture(scope="module", autouse=True)
def yaml_read_once() -> Iterator[None]:
    parsed = functools.cache(yaml_text.parse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_text, "parse", lambda text: copy.deepcopy(parsed(text)))
        yield


@pytest.fixture(scope="module", autouse=True)
def more_nodes_are_not_tried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_counts, "least_nodes", lambda *_: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def nobody_elses_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4KIT_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("DSV4KIT_CONFIG", str(tmp_path_factory.mktemp("config")))
        yield


def chosen(asked: tuple[str, dict[str, int], str | None]) -> tuple[dict[str, str], list[str], str]:
    """Combination, SET words and site of one question."""
    profile, picked, site = asked
    words = [f"{key}={CHANGES[key][number % len(CHANGES[key])]}" for key, number in picked.items()]
    combination = combinations()[profile]
    return combination, words, site or hardware_defaults(combination["hardware"])["site"]


def selecting(combination: dict[str, str]) -> list[str]:
    return [f"--hw={combination['hardware']}", f"--model={combination['model']}", f"--recipe={combination['recipe']}"]


def said(verb: str, asked: tuple[str, dict[str, int], str | None]) -> tuple[int, str]:
    """Exit code and refusal of a verb; the site is named only where it is not the hardware's own."""
    combination, words, _ = chosen(asked)
    options = selecting(combination)
    options += [f"--set={word}" for word in words] + ([f"--site={asked[2]}"] if asked[2] else [])
    options += ["--dry-run", "--run=r"] if verb == "submit" else []
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main.run([verb, *options])
        except UserError as error:
            return 2, str(error)
    # Where only the split does not go into the nodes, `plan` says so and plans another one.
    first = out.getvalue().partition("\n")[0]
    if verb == "plan" and code == 3 and first.startswith(REFUSED):
        return 2, first.removeprefix(REFUSED)
    return code, ""


def case_of(combination: dict[str, str], words: list[str], site: str) -> Case:
    """The case those words make, as the command line does."""
    pairs = [split_pair(word, "SET") for word in words]
    overrides = [Override(key, None if text == "null" else text, f"SET {key}") for key, text in pairs]
    resolved = load_settings(combination["hardware"], combination["model"], combination["recipe"], overrides)
    return Case(resolved.settings, resolved.sources, load_site(site))


@given(ASKED)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_plan_and_submit_answer_alike(asked: tuple[str, dict[str, int], str | None]) -> None:
    """Refused by neither or by both, in the same line; impossible for neither or for both."""
    assert said("plan", asked) == said("submit", asked)


@pytest.mark.parametrize("word", ["--verl=trainer.nonsense=1", "--set=verl.trainer.nonsense=1"])
def test_a_key_that_verl_does_not_know_is_refused_by_plan_too(word: str) -> None:
    with pytest.raises(UserError, match=r"has no key 'trainer.nonsense' \(did you mean"):
        main.run(["plan", "--hw=h100", word])


@given(ASKED)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_lever_is_refused(asked: tuple[str, dict[str, int], str | None]) -> None:
    try:
        case = case_of(*chosen(asked))
    except UserError:
        return
    if next(refusals(case, OF_SETTINGS), None) or (plan := plan_of(case.settings, case.site.name)) is None:
        return
    combination, words, site = chosen(asked)
    for lever in levers(plan, allows(case)):
        added = split_words(lever.setting, "SET")
        changed = case_of(combination, [*words, *added], site)
        assert [r.line for r in refusals(changed, OF_SETTINGS)] == [], lever
        # The settings that are named are those whose effect is shown.
        again = plan_of(changed.settings, site)
        assert again is not None
        assert again.memory.training_gib == lever.gpu_gib, lever


@given(ASKED)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nothing_that_is_searched_is_refused(asked: tuple[str, dict[str, int], str | None]) -> None:
    try:
        case = case_of(*chosen(asked))
        own = question(case.settings)
    except UserError:
        return
    assert own is not None
    for found in search(own, built_in(), allows(case), keep=4):
        changed = case.changed(changes(own, found.question))
        assert [r.line for r in refusals(changed, OF_SETTINGS)] == []
        assert question(changed.settings) == found.question
        # The same question asked of `plan` has the same answer.
        again = evaluate(question(changed.settings), built_in())
        assert again.verdict == found.plan.verdict
        assert again.step == found.plan.step


@pytest.mark.parametrize("profile", [name for name in LARGE if "-4l-" not in name])
def test_the_first_row_of_a_search_can_be_submitted(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    combination = combinations()[profile]
    options = selecting(combination)
    assert main.run(["plan", *options, "--search", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["candidates"][0]["set"]
    words = [f"--set={key}={'null' if value is None else value}" for key, value in first.items()]
    assert main.run(["submit", "--dry-run", "--run=r", *options, *words]) == 0


def test_a_plan_without_a_site_is_one_for_the_hardwares_own() -> None:
    answers = []
    for options in ([], ["--site=example-gb200-pyxis"]):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main.run(["plan", "--hw=gb200", "--json", *options]) == 0
        answer = json.loads(out.getvalue())
        # Its commands name the site where the user did.
        answer["recommended"] = [x["what"] for x in answer["recommended"]]
        answers.append(answer)
    assert answers[0] == answers[1]
    assert asks_for_segment(load_site("example-gb200-pyxis"))
    assert not any("--segment" in warning for warning in answers[0]["warnings"])


def test_every_refusal_names_its_setting_and_value() -> None:
    case = case_of(
        combinations()["pro-grpo-h100"],
        ["schedule.nodes=48", "parallel.actor.expert_parallel_size=5"],
        "example-h100-pyxis",
    )
    found = list(refusals(case, OF_SETTINGS))
    assert {("schedule.nodes", 48), ("parallel.actor.expert_parallel_size", 5)} <= {(r.key, r.value) for r in found}
    assert found[0].line == (
        "SET parallel.actor.expert_parallel_size=5: does not divide the 384 experts of a layer (Megatron-LM"
        " transformer_config.py); nearest: 4 or 6"
    )


@pytest.mark.parametrize("data", [1, 8])
def test_tensor_parallelism_above_a_node_means_the_same_everywhere(data: int) -> None:
    """verl asserts that it divides a node's GPUs where there is data parallelism, and runs it over whole nodes else."""
    words = ["rollout.tensor_model_parallel_size=16", f"parallel.rollout.data_parallel_size={data}"]
    case = case_of(combinations()["pro-grpo-h100"], words, "example-h100-pyxis")
    about = [r for r in refusals(case, OF_SETTINGS) if r.key == "rollout.tensor_model_parallel_size"]
    assert bool(about) == (data > 1)


def test_a_run_that_was_submitted_is_asked_all_but_what_verl_was_told() -> None:
    combination, site = combinations()["pro-grpo-h100"], "example-h100-pyxis"
    words = ["verl.trainer.nonsense=1", "schedule.steps=100000"]
    case = case_of(combination, words, site)
    resumed = Case(case.settings, case.sources, case.site, first_step=99_000, submitted=True)
    assert list(refusals(resumed, RULES)) == []
    resumed = Case(case.settings, case.sources, case.site, first_step=1000, submitted=True)
    assert [r.key for r in refusals(resumed, RULES)] == ["schedule.steps"]


def test_files_that_were_named_are_looked_at_by_plan_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="in Hugging Face form"):
        main.run(["plan", "--hw=h100", f"--model-path={tmp_path / 'model'}"])
    with pytest.raises(UserError, match=r"train.parquet' does not exist"):
        main.run(["plan", "--hw=h100", f"--train-file={tmp_path / 'train.parquet'}"])
