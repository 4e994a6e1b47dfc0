"""Measured runs refit the site's constants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from plan_cases import BUILT_IN, PRO_GB200, PRO_H100

from dsv4kit.cli import main
from dsv4kit.config.loading import SITES
from dsv4kit.errors import UserError
from dsv4kit.plan.core import evaluate
from dsv4kit.plan.fitted.calibrated import PUBLISHED
from dsv4kit.plan.fitted.calibration import calibrate
from dsv4kit.plan.fitted.site_constants import coefficients_for, path_of

MIB = 2**20


@pytest.fixture(autouse=True)
def _own_config(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4KIT_CONFIG", str(tmp_path / "config"))


def make_run(path, question, base_gb, head_gb, context_gib, hbm_gb=0.0):
    """A run whose nodes hold what the formula says, with another base, head and context."""
    plan = evaluate(question, BUILT_IN)
    nodes = path / "segments" / "0001" / "attempt-0" / "nodes"
    nodes.mkdir(parents=True)
    index = 0
    for node in plan.memory.nodes:
        for copy in range(node.nodes):
            host = node.physical_gb - node.base_gb - node.head_extra_gb + base_gb
            host += head_gb if node.head and copy == 0 else 0
            gpu = max(plan.memory.stages[s].need_gib for s in node.stages) - 6 + context_gib
            rows = [
                "time,memory_used_mib,memory_available_mib,shm_used_mib,numa0_used_mib,numa2_used_mib,gpu0_used_mib"
            ]
            for part in (0.5, 1.0):
                used = (host * part + hbm_gb) * 1e9 / MIB
                rows.append(f"1.0,{used:.0f},1,1,{used:.0f},{hbm_gb * 1e9 / MIB:.0f},{gpu * 1024 * part:.0f}")
            rows.append("2.0,12")  # killed while writing
            (nodes / f"node{index}.csv").write_text("\n".join(rows))
            index += 1
    return path


def add_metrics(path, steps):
    lines = [json.dumps({"step": i, "data": data}) for i, data in enumerate(steps)]
    (path / "segments" / "0001" / "attempt-0" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "da']))


def step(total, gen=300.0, uw=240.0):
    return {"timing_s/step": total, "timing_s/gen": gen, "timing_s/update_weights": uw}


def test_a_run_gives_back_the_constants_it_was_made_with(tmp_path):
    run = make_run(tmp_path / "first", PRO_GB200, base_gb=75, head_gb=90, context_gib=8)
    add_metrics(run, [step(2000.0), step(900.0), step(900.0)])
    values, _ = calibrate(run, PRO_GB200, "rack")
    assert values["host_base_gb.aarch64"] == pytest.approx(75, abs=1)
    assert values["host_head_extra_gb.aarch64"] == pytest.approx(90, abs=1)
    assert values["gpu_context_gib.aarch64"] == pytest.approx(8, abs=0.1)
    assert values["cpu_adam_s_per_parameter.gb200"] > BUILT_IN.of("cpu_adam_s_per_parameter", "gb200")
    assert values["first_step_extra_s.gb200"] == pytest.approx(1100)

    site = coefficients_for("rack")
    assert "rack" in site.coefficients.origin
    assert "first" in site.coefficients.origin
    again = evaluate(PRO_GB200, site.coefficients, site.points)
    assert again.step.steady_s == pytest.approx(900)
    assert again.memory.nodes[0].base_gb == pytest.approx(75, abs=1)


def test_gpu_memory_that_shows_as_numa_nodes_is_not_host_memory(tmp_path):
    run = make_run(tmp_path / "numa", PRO_GB200, base_gb=75, head_gb=90, context_gib=8, hbm_gb=600)
    values, _ = calibrate(run, PRO_GB200, "rack")
    assert values["host_base_gb.aarch64"] == pytest.approx(75, abs=1)


def test_a_run_elsewhere_is_no_longer_extrapolated_there(tmp_path):
    other = PRO_H100._replace(work=PRO_H100.work._replace(response_tokens=6144))
    assert evaluate(other, BUILT_IN).step_extrapolated
    run = make_run(tmp_path / "other", other, 89, 0, 5)
    add_metrics(run, [step(2000.0), step(900.0)])
    calibrate(run, other, "here")
    site = coefficients_for("here")
    assert evaluate(other, site.coefficients, site.points).step_extrapolated == ()


def test_of_several_runs_the_highest_memory_and_the_latest_times_count(tmp_path):
    for name, base, total in (("one", 95, 800.0), ("two", 85, 700.0)):
        run = make_run(tmp_path / name, PRO_H100, base, 0, 5)
        add_metrics(run, [step(2000.0), step(total)])
        calibrate(run, PRO_H100, "here")
    fitted = coefficients_for("here").coefficients
    assert fitted.of("host_base_gb", "x86_64") == pytest.approx(95, abs=1)
    assert evaluate(PRO_H100, fitted).step.steady_s == pytest.approx(700)
    assert len(yaml.safe_load(path_of("here").read_text())["runs"]) == 2


def test_a_site_without_runs_uses_the_built_in_constants():
    assert coefficients_for("nowhere").coefficients.origin == "built-in"
    assert coefficients_for(None).coefficients.origin == "built-in"
    assert coefficients_for("a/path.yaml").coefficients.origin == "built-in"


def test_a_run_that_measured_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="no memory samples"):
        calibrate(tmp_path, PRO_H100, "here")


def test_a_site_name_that_is_a_path_is_refused(tmp_path):
    run = make_run(tmp_path / "run", PRO_H100, 89, 0, 5)
    with pytest.raises(UserError, match=r"site '\.\./x'"):
        calibrate(run, PRO_H100, "../x")


@pytest.mark.parametrize("text", ["", "[", "runs: 3", "runs: [{run: a}]", "runs: [{run: a, point: {}, values: {}}]"])
def test_a_broken_calibration_file_is_one_line(text):
    path_of("here").parent.mkdir(parents=True)
    path_of("here").write_text(text)
    with pytest.raises(UserError) as error:
        coefficients_for("here")
    assert "\n" not in str(error.value)


def test_a_constant_nobody_knows_is_named_with_the_nearest():
    entry = f"{{run: r1, point: {json.dumps(PUBLISHED[0]._asdict())}, values: {{host_bass_gb.aarch64: 5}}}}"
    path_of("rack").parent.mkdir(parents=True)
    path_of("rack").write_text(f"runs: [{entry}]")
    with pytest.raises(UserError, match=r"run r1: host_bass_gb.aarch64: no such constant \(did you mean 'host_base"):
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
    run = make_run(tmp_path / "first", PRO_GB200, base_gb=75, head_gb=90, context_gib=8)
    calibrate(run, PRO_GB200, "rack")
    site = tmp_path / "mine.yaml"
    site.write_text((SITES / "example-gb200-pyxis.yaml").read_text().replace("name: example-gb200-pyxis", "name: rack"))
    assert main.run(["plan", "--hw=gb200", f"--site={site}", "--explain"]) == 0
    assert "fitted at rack (runs first)" in capsys.readouterr().out
