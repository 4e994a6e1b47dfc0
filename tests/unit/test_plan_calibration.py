"""Measured runs refit the site's constants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from fitted_runs import MadeRun, truth
from plan_cases import ALL_OFF_THE_GPU, BUILT_IN, GB300, PRO, PRO_GB200, PRO_H100, first_layers, flash_sft

from dsv4kit.cli import main
from dsv4kit.config.loading import SITES, load_settings
from dsv4kit.errors import UserError
from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted.inputs import ActorSplit, RolloutSplit
from dsv4kit.plan.fitted.calibrated import PUBLISHED
from dsv4kit.plan.fitted.calibration import calibrate, forget, shape_of
from dsv4kit.plan.fitted.site_constants import coefficients_for, path_of
from dsv4kit.plan.from_settings import question
from dsv4kit.plan.shown import fit_table

REAL = {
    "host_base_gb__aarch64": 75.0,
    "host_head_extra_gb__aarch64": 90.0,
    "gpu_context_gib__aarch64": 8.0,
    "decode_s_per_token__gb200": 0.045,
    "refit_gb_per_s": 18.0,
    "cpu_adam_s_per_parameter__gb200": 9e-9,
    "first_step_extra_s__gb200": 700.0,
    "first_step_extra_warm_s": 60.0,
    "setup_s": 640.0,
    "save_gb_per_s": 4.0,
}
# The proxy of Pro: four layers, one stage.
PROXY = PRO_GB200._replace(
    model="dsv4-pro-4l",
    geometry=first_layers(PRO, 4),
    layout=None,
    parallel=ActorSplit(nodes=2, gpus_per_node=4, pipeline=1, expert=8),
    rollout=RolloutSplit(tensor=1, data=8, expert=8, utilization=0.5),
    levers=ALL_OFF_THE_GPU._replace(precision_aware=True),
)


@pytest.fixture(autouse=True)
def _own_config(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4KIT_CONFIG", str(tmp_path / "config"))


def fitted(run, question, site="rack", **options):
    return calibrate(run.path, question, shape_of(question), question.hardware.name, site, **options)


def values(found):
    return {name: x.value for name, x in found.fit.values.items()}


def whole_run(path, question=PRO_GB200, attempts=2, **options):
    """A run of several segments, each on hosts of its own."""
    run = MadeRun(path, question, truth(**REAL))
    for number in range(attempts):
        run.attempt(hosts=f"rack{number}-", **options)
    return run


def assert_the_truth(found, names=REAL, within=0.06):
    got = values(found)
    for name in names:
        name = name.replace("__", ".")
        # The difference of two steps of some 900 s, which differ by a percent.
        slack = 25.0 if "first_step" in name else 0.0
        assert got[name] == pytest.approx(truth(**REAL).by_name[name].value, rel=within, abs=slack), name
        assert found.fit.values[name].low <= got[name] <= found.fit.values[name].high


def test_a_run_gives_back_the_constants_it_was_made_with(tmp_path):
    found = fitted(whole_run(tmp_path / "first"), PRO_GB200)
    assert_the_truth(found)
    assert found.fit.not_fitted == {
        "layer_floor_s": "with Adam on the CPU the two cannot be told apart; that one was fitted"
    }
    for residual in found.fit.residuals:
        assert residual.after == pytest.approx(residual.measured, rel=0.05), residual.what
    site = coefficients_for("rack")
    assert "first" in site.coefficients.origin
    assert evaluate(PRO_GB200, site.coefficients, site.points).memory.nodes[0].base_gb == pytest.approx(75, abs=2)


@pytest.mark.parametrize("utilization", [0.5, 0.7, 0.8])
def test_vllms_share_of_a_gpu_is_not_the_trainers_context(tmp_path, utilization):
    question = PRO_H100._replace(rollout=PRO_H100.rollout._replace(utilization=utilization))
    run = MadeRun(tmp_path / "run", question, truth(gpu_context_gib__x86_64=6.5))
    run.attempt()
    found = fitted(run, question)
    assert values(found)["gpu_context_gib.x86_64"] == pytest.approx(6.5, abs=0.5)
    site = coefficients_for("rack")
    assert evaluate(question, site.coefficients).verdict.verdict == evaluate(question, run.real).verdict.verdict


def test_nodes_that_hold_much_more_and_a_few_slow_steps_do_not_move_a_constant(tmp_path):
    run = MadeRun(tmp_path / "odd", PRO_GB200, truth(**REAL))
    run.attempt(steps=8, odd={7: 150.0, 20: 90.0, 33: 200.0, 50: 60.0})
    path = run.attempt(steps=8, hosts="other")
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()[:-1]]
    for name in ("gen", "step"):
        records[4]["data"][f"timing_s/{name}"] += 4000.0
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert_the_truth(fitted(run, PRO_GB200))


def test_missing_files_and_nodes_cost_only_what_they_held(tmp_path):
    run = MadeRun(tmp_path / "holes", PRO_GB200, truth(**REAL))
    run.attempt(without_samples={5, 6, 40})
    run.attempt(hosts="other", gone={30}, without_samples={1})
    found = fitted(run, PRO_GB200)
    assert_the_truth(found)
    # Of two nodes at a border between kinds of stages nobody knows which one is gone.
    assert int(found.fit.values["host_base_gb.aarch64"].basis.split()[0]) < 2 * 63 - 5


def test_an_attempt_that_trained_nothing_teaches_nothing(tmp_path):
    run = MadeRun(tmp_path / "died", PRO_GB200, truth(**REAL))
    dead = run.attempt(odd=dict.fromkeys(range(64), -200.0))
    (dead / "metrics.jsonl").write_text("")
    run.attempt(hosts="other")
    found = fitted(run, PRO_GB200)
    assert ("0001/attempt-0", "trained no step") in found.seen.left_out
    assert_the_truth(found, [name for name in REAL if "first_step_extra" not in name])


def test_a_run_without_any_step_is_refused_and_changes_nothing(tmp_path):
    run = MadeRun(tmp_path / "died", PRO_GB200, truth(**REAL))
    (run.attempt() / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"died: no attempt of it trained a step.*0001/attempt-0: trained no step"):
        fitted(run, PRO_GB200)
    assert not path_of("rack").exists()


def test_what_a_short_run_cannot_tell_is_said(tmp_path):
    run = MadeRun(tmp_path / "one", PRO_GB200, truth(**REAL))
    path = run.attempt(steps=1)
    (path / "phases.jsonl").unlink()
    with pytest.raises(UserError, match="setup_s: node 0 left no marks"):
        fitted(run, PRO_GB200)
    run.attempt(steps=1, hosts="other", save_every=9)
    found = fitted(run, PRO_GB200)
    assert set(values(found)) == {"setup_s", "host_base_gb.aarch64", "host_head_extra_gb.aarch64"}
    assert found.fit.not_fitted["refit_gb_per_s"] == "no weight update was timed"
    assert found.fit.not_fitted["save_gb_per_s"] == "no save was seen"
    assert "no save tells when its updates ran" in found.fit.not_fitted["gpu_context_gib.aarch64"]
    assert "no attempt has a second step" in fit_table.render(found)


def test_settings_that_a_resume_changed_leave_the_earlier_segments_out(tmp_path):
    run = whole_run(tmp_path / "changed")
    (tmp_path / "changed" / "segments" / "0002" / "changes.json").write_text('{"parallel.actor.layout": [null, "x"]}')
    found = fitted(run, PRO_GB200)
    assert [attempt.name for attempt in found.seen.attempts] == ["0002/attempt-0"]
    assert "settings were changed from segment 2 on" in fit_table.render(found)


@pytest.mark.parametrize("nodes", [2, 4])
def test_the_proxy_makes_a_site_known_before_the_whole_model_runs(tmp_path, nodes):
    question = PROXY._replace(parallel=PROXY.parallel._replace(nodes=nodes))
    found = fitted(whole_run(tmp_path / "proxy", question, save_every=1), question)
    assert_the_truth(found)
    site = coefficients_for("rack")
    real, said = evaluate(PRO_GB200, truth(**REAL)), evaluate(PRO_GB200, site.coefficients, site.points)
    assert said.step.steady_s == pytest.approx(real.step.steady_s, rel=0.03)
    assert said.memory.fullest_node.physical_gb == pytest.approx(real.memory.fullest_node.physical_gb, rel=0.02)
    assert said.memory_extrapolated == ()


def test_sft_which_times_no_steps_is_timed_by_its_saves(tmp_path):
    question = flash_sft(GB300, 8, 4)
    question = question._replace(schedule=question.schedule._replace(save_freq=4))
    real = truth(layer_floor_s=0.03, gpu_context_gib__aarch64=7.0, save_gb_per_s=6.0)
    run = MadeRun(tmp_path / "sft", question, real)
    run.attempt(steps=16, save_every=4)
    got = values(fitted(run, question))
    assert got["layer_floor_s"] == pytest.approx(0.03, rel=0.1)
    assert got["gpu_context_gib.aarch64"] == pytest.approx(7, abs=0.6)
    assert got["save_gb_per_s"] == pytest.approx(6, rel=0.1)


def test_gpu_memory_that_shows_as_numa_nodes_is_not_host_memory(tmp_path):
    run = MadeRun(tmp_path / "numa", PRO_GB200, truth(**REAL))
    run.attempt(gpu_numa_gb=600)
    assert values(fitted(run, PRO_GB200))["host_base_gb.aarch64"] == pytest.approx(75, abs=2)


def test_a_run_elsewhere_is_no_longer_extrapolated_there(tmp_path):
    other = PRO_H100._replace(work=PRO_H100.work._replace(response_tokens=6144))
    assert evaluate(other, BUILT_IN).step_extrapolated
    run = MadeRun(tmp_path / "other", other, BUILT_IN)
    run.attempt(steps=3)
    fitted(run, other, "here")
    site = coefficients_for("here")
    assert evaluate(other, site.coefficients, site.points).step_extrapolated == ()


def test_of_several_runs_the_highest_memory_and_the_latest_times_count_and_one_can_be_taken_out(tmp_path):
    for name, base, refit in (("one", 95.0, 20.0), ("two", 85.0, 30.0)):
        run = MadeRun(tmp_path / name, PRO_H100, truth(host_base_gb__x86_64=base, refit_gb_per_s=refit))
        run.attempt(steps=3)
        fitted(run, PRO_H100, "here")
    both = coefficients_for("here").coefficients
    assert both.of("host_base_gb", "x86_64") == pytest.approx(95, abs=2)
    assert both.of("refit_gb_per_s") == pytest.approx(30, rel=0.03)
    assert forget("one") == (path_of("here"),)
    assert coefficients_for("here").coefficients.of("host_base_gb", "x86_64") == pytest.approx(85, abs=2)
    forget(str(tmp_path / "two"), "here")
    assert coefficients_for("here").coefficients == BUILT_IN
    with pytest.raises(UserError, match="no constants were fitted to a run 'two'"):
        forget("two")


def test_a_dry_run_keeps_nothing_and_a_bad_run_leaves_no_trace(tmp_path, capsys):
    run = whole_run(tmp_path / "tried", PROXY, save_every=1)
    found = fitted(run, PROXY, dry_run=True)
    assert_the_truth(found)
    assert not path_of("rack").exists()
    good = whole_run(tmp_path / "good", PROXY, save_every=1)
    fitted(good, PROXY)
    before = path_of("rack").read_bytes()
    fitted(run, PROXY)
    assert main.run(["plan", "--forget=tried"]) == 0
    assert path_of("rack").read_bytes() == before
    assert "nothing of tried is in it any more" in capsys.readouterr().out
    with pytest.raises(UserError):
        main.run(["plan", "--forget=god", "--json"])
    assert json.loads(capsys.readouterr().out)["refused"].endswith("(did you mean 'good'?); there are good")


def test_the_table_says_before_after_and_what_is_left_over(tmp_path):
    run = whole_run(tmp_path / "run")
    text = fit_table.render(fitted(run, PRO_GB200))
    assert "2 of its attempts: 0001/attempt-0 (5 steps), 0002/attempt-0 (5 steps)" in text
    assert "GPU of stage 0, update" in text
    assert "layer_floor_s: with Adam on the CPU" in text
    shown = fit_table.as_json(fitted(run, PRO_GB200))
    json.dumps(shown, allow_nan=False)
    assert shown["constants"]["setup_s"]["before"] == pytest.approx(640, rel=0.05)  # the same run once more


def test_a_site_without_runs_uses_the_built_in_constants():
    assert coefficients_for("nowhere").coefficients.origin == "built-in"
    assert coefficients_for(None).coefficients.origin == "built-in"
    assert coefficients_for("a/path.yaml").coefficients.origin == "built-in"


def test_a_site_name_that_is_a_path_is_refused(tmp_path):
    run = whole_run(tmp_path / "run", PROXY)
    with pytest.raises(UserError, match=r"site '\.\./x'"):
        fitted(run, PROXY, "../x")


def test_the_file_has_a_version_and_what_earlier_kits_wrote_is_read(tmp_path):
    fitted(whole_run(tmp_path / "run", PROXY), PROXY)
    assert yaml.safe_load(path_of("rack").read_text())["version"] == 2
    old = {
        "run": "old",
        "point": PUBLISHED[1]._asdict(),
        "values": {"host_base_gb.aarch64": 70.5, "train_s.gb200": 215.0},
    }
    path_of("old").write_text(yaml.safe_dump({"site": "old", "runs": [old]}))
    site = coefficients_for("old")
    assert site.coefficients.of("host_base_gb", "aarch64") == 70.5
    assert "fitted at old (runs old)" in site.coefficients.origin
    path_of("new").write_text("version: 3\nruns: []\n")
    with pytest.raises(UserError, match=r"new.yaml: written by a newer kit \(version 3; this one reads up to 2\)"):
        coefficients_for("new")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "runs: 3", "runs: [{run: a}]", "runs: [{run: a, point: {}, values: {}}]"),
        "version: 2\nruns: [{run: a, point: null, values: {setup_s: {value: 5, low: 6, high: 7, basis: x}}}]",
        "version: 2\nruns: [{run: a, point: null, values: {setup_s: {value: 5}}}]",
    ],
)
def test_a_broken_calibration_file_is_one_line(text):
    path_of("here").parent.mkdir(parents=True)
    path_of("here").write_text(text)
    with pytest.raises(UserError, match="not a calibration file") as error:
        coefficients_for("here")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("host_bass_gb.aarch64", r"no such constant \(did you mean 'host_base"),
        ("host_base_gb", "no such constant; allowed: host_base_gb.x86_64, host_base_gb.aarch64"),
        ("setup_s.gb200", "no such constant; allowed: setup_s"),
    ],
)
def test_a_constant_nobody_knows_is_named(name, why):
    entry = f"{{run: r1, point: {json.dumps(PUBLISHED[0]._asdict())}, values: {{{name}: 5}}}}"
    path_of("rack").parent.mkdir(parents=True)
    path_of("rack").write_text(f"runs: [{entry}]")
    with pytest.raises(UserError, match=rf"run r1: {name}: {why}"):
        coefficients_for("rack")


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
def test_a_constant_that_is_no_number_is_one_line(value):
    entry = f"{{run: r, point: {json.dumps(PUBLISHED[0]._asdict())}, values: {{host_base_gb.aarch64: {value}}}}}"
    path_of("rack").parent.mkdir(parents=True)
    path_of("rack").write_text(f"runs: [{entry}]")
    with pytest.raises(UserError, match="not a calibration file"):
        coefficients_for("rack")


def test_a_user_without_a_home_is_told_so(monkeypatch):
    def no_home():
        raise RuntimeError

    monkeypatch.delenv("DSV4KIT_CONFIG")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UserError, match="DSV4KIT_CONFIG"):
        path_of("rack")


def test_a_site_that_is_a_file_has_the_constants_of_its_name(tmp_path, capsys):
    fitted(whole_run(tmp_path / "first", PROXY), PROXY)
    site = tmp_path / "mine.yaml"
    site.write_text((SITES / "example-gb200-pyxis.yaml").read_text().replace("name: example-gb200-pyxis", "name: rack"))
    assert main.run(["plan", "--hw=gb200", f"--site={site}", "--explain"]) == 0
    assert "fitted at rack (runs first)" in capsys.readouterr().out


def test_a_dry_run_of_nothing_is_refused():
    with pytest.raises(UserError, match="goes with CALIBRATE=RUN_DIR"):
        main.run(["plan", "--hw=gb200", "--dry-run"])


def test_a_run_of_the_kit_is_calibrated_by_its_directory(tmp_path, capsys):
    settings = load_settings("gb200", "dsv4-pro-4l", "grpo").settings
    asked = question(settings)
    run = MadeRun(tmp_path / "proxy", asked, truth(**REAL))
    run.attempt(save_every=1)
    record = {"settings": settings.model_dump(mode="json"), "site": {"name": "rack"}}
    (run.path / "run.yaml").write_text(yaml.safe_dump(record))
    assert main.run(["plan", f"--calibrate={run.path}", "--dry-run"]) == 0
    assert "nothing was kept" in capsys.readouterr().out
    assert main.run(["plan", f"--calibrate={run.path}", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["constants"]["refit_gb_per_s"]["in_use"] == pytest.approx(18, rel=0.05)
    assert path_of("rack").is_file()


def test_a_run_whose_model_has_no_geometry_tells_how_long_starts_and_saves_take(tmp_path, capsys):
    settings = load_settings("cpu", "tiny", "grpo").settings
    run = MadeRun(tmp_path / "tiny", PROXY, truth(**REAL))
    run.attempt()
    (run.path / "run.yaml").write_text(
        yaml.safe_dump({"settings": settings.model_dump(mode="json"), "site": {"name": "sandbox"}})
    )
    shards = run.path / "checkpoints" / "global_step_4" / "actor"
    shards.mkdir(parents=True)
    (shards / "shard").write_bytes(bytes(10**6))
    assert main.run(["plan", f"--calibrate={run.path}", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown["constants"]) == {"setup_s", "save_gb_per_s", "first_step_extra_s.cpu"}
    assert "no geometry" in shown["not_fitted"]["memory and the parts of a step"]
    assert coefficients_for("sandbox").points == PUBLISHED
