"""What the planner prints: for programs, for people, and from a profile."""

from __future__ import annotations

import argparse
import json
import time

import pytest
from plan_cases import BUILT_IN, GB300, H100, PRO_GB200, PRO_H100, flash_sft

from dsv4kit.cli import main
from dsv4kit.cli import plan as cli
from dsv4kit.config import schema
from dsv4kit.config.loading import HERE, load_settings, load_yaml, names
from dsv4kit.errors import UserError
from dsv4kit.plan import node_counts
from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted.inputs import Levers, RolloutSplit, Work
from dsv4kit.plan.counted.topology import slurm_segment
from dsv4kit.plan.from_settings import question
from dsv4kit.plan.levers import levers
from dsv4kit.plan.node_counts import least_nodes
from dsv4kit.plan.of_settings import plan_of
from dsv4kit.plan.search import Candidate, compared, search
from dsv4kit.plan.shown.as_json import as_json
from dsv4kit.plan.shown.explain import explain
from dsv4kit.plan.shown.search_table import gain, render_search
from dsv4kit.plan.shown.table import render


def cli_run(words):
    main.run(["plan", *words])


def plan(asked):
    return evaluate(asked, BUILT_IN)


def pro_settings(**changes):
    """A profile of Pro on H100 as plain settings, on top of the tiny one's for all the planner does not look at."""
    tree = load_settings("cpu", "tiny", "grpo").settings.model_dump()
    tree["hardware"] = load_yaml(HERE / "hardware" / "h100.yaml")["hardware"]
    tree["model"] = load_yaml(HERE / "models" / "dsv4-pro.yaml")["model"]
    tree["ray"]["object_store_gib"] = 32
    tree["env"], tree["verl"] = {}, {}
    tree["engine"] |= {"full_recompute": True}
    tree["data"] |= {"train_batch_size": 8, "max_prompt_length": 2048, "max_response_length": 4096}
    tree["rollout"] |= {"n": 8, "tensor_model_parallel_size": 8}
    tree["schedule"] |= {"nodes": 64, "time": "4:00:00", "segment_steps": 40, "save_freq": 10, "steps": 1000}
    tree["checkpoint"]["contents"] = ["model", "extra"]
    tree["parallel"] = {
        "actor": {"pipeline_parallel_size": 32, "expert_parallel_size": 8},
        "rollout": {"data_parallel_size": 8},
    }
    tree["optimizer"] = {
        "cpu_offload": True,
        "precision_aware": True,
        "bf16_gradients": True,
        "param_offload": True,
        "optimizer_offload": True,
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree[section] = {**tree[section], name: value}
    return schema.Settings.model_validate(tree)


def test_a_profile_becomes_the_same_question_as_by_hand():
    asked = question(pro_settings())
    assert asked is not None
    by_hand = PRO_H100._replace(rollout=PRO_H100.rollout._replace(max_batched_tokens=2048 + 4096))
    assert asked._replace(env=(), schedule=PRO_H100.schedule) == by_hand


def test_the_tiny_model_has_nothing_to_plan():
    settings = load_settings("cpu", "tiny", "grpo").settings
    assert question(settings) is None
    assert plan_of(settings, "sandbox") is None


def test_the_verdict_submit_asks_for(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4KIT_CONFIG", str(tmp_path))
    assert plan_of(pro_settings(), "somewhere").verdict.verdict == "fit"
    hopeless = plan_of(
        pro_settings(optimizer__precision_aware=False, optimizer__bf16_gradients=False), "somewhere"
    ).verdict
    assert hopeless.verdict == "no"
    assert hopeless.reasons


def test_torchs_rounding_threshold_is_read_from_the_environment():
    asked = question(
        pro_settings(env__PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,pinned_max_round_threshold_mb:64")
    )
    assert asked.levers.pinned_round_threshold_mb == 64


def test_hardware_without_numbers_is_refused_in_one_line():
    with pytest.raises(UserError, match="hbm_usable_gib"):
        question(pro_settings(hardware__hbm_usable_gib=None))


@pytest.mark.parametrize("name", [name for name in names("hardware") if name != "cpu"])
def test_shipped_hardware_can_be_planned_for(name):
    hardware = schema.Hardware(**load_yaml(HERE / "hardware" / f"{name}.yaml")["hardware"])
    assert question(pro_settings().model_copy(update={"hardware": hardware})).hardware.hbm_gib > 70


def test_json_has_the_promised_keys():
    shown = json.loads(json.dumps(as_json(plan(PRO_H100))))
    assert {"verdict", "reasons", "gpu", "host", "checkpoint", "rollout", "step", "segment"} <= shown.keys()
    for stage in shown["gpu"]["stages"]:
        assert {"stage", "layers", "static_gib", "peak_gib", "need_gib", "limit_gib"} <= stage.keys()
    wanted = {"nodes", "role", "pageable_gb", "pinned_gb", "physical_gb", "reported_gb", "limit_gb"}
    for node in shown["host"]["nodes"]:
        assert wanted <= node.keys()
    assert {"contents", "size_gb", "lossless", "note"} <= shown["checkpoint"].keys()
    assert {"weights_gb", "kv_tokens", "fits"} <= shown["rollout"].keys()
    assert {"steady_s", "first_s"} <= shown["step"].keys()
    assert {"steps", "count", "goodput"} <= shown["segment"].keys()
    assert len(shown["gpu"]["stages"]) == 32


@pytest.mark.parametrize("asked", [PRO_H100, PRO_GB200, flash_sft(GB300, 8, 4, mtp=True), flash_sft(H100, 4, 4)])
def test_json_is_strict(asked):
    shown = plan(asked)
    json.dumps(as_json(shown, levers(shown)), allow_nan=False)


@pytest.mark.parametrize("asked", [PRO_H100, PRO_GB200, flash_sft(GB300, 8, 4, mtp=True), flash_sft(H100, 4, 4)])
def test_the_text_says_what_it_is_about(asked):
    shown = plan(asked)
    text = render(shown, levers(shown))
    assert f"{asked.parallel.world} GPUs" in text
    assert "VERDICT" in text
    assert shown.layout in text
    assert ("extrapolated" in text.lower()) == bool(shown.step_extrapolated)
    assert all(len(line) <= 130 for line in text.splitlines() if "SET=" not in line)


def test_equal_stages_are_one_line():
    assert "1-27: 2 layers" in render(plan(PRO_H100))


def test_explain_shows_formula_and_kind_of_every_constant():
    text = explain(plan(PRO_GB200))
    assert "peak = 57.0 + max(20.9, 24.2) + 1.8 = 83.0 GiB" in text
    for name in BUILT_IN.by_name:
        assert name in text
    assert "[guessed]" in text


# What the planner chooses or says of itself is no belief about the world.
CHOICES = ("tail_s", "host_fit_below", "time_error_extrapolated", "layout_time_error")


def test_every_constant_has_unit_kind_and_source():
    for name, constant in BUILT_IN.by_name.items():
        assert constant.kind == "derived" or name in CHOICES or constant.low <= constant.value <= constant.high, name
        assert constant.unit
        assert constant.source
        assert constant.kind in ("derived", "fitted", "guessed")


def test_levers_that_would_make_32_h100_hold_flash():
    offered = levers(plan(flash_sft(H100, 4, 4)))
    fits = [lever.change for lever in offered if lever.verdict == "fit"]
    assert "16 nodes with PP 16" in fits
    assert "precision-aware, bf16 gradients, Adam on the CPU" in fits
    assert offered[0].verdict == "fit"


def test_levers_of_the_gb200_head_node():
    effect = {lever.change: lever for lever in levers(plan(PRO_GB200))}
    assert effect["precision-aware optimizer"].host_change_gb == pytest.approx(-158, abs=2)
    assert effect["the generated layout"].host_change_gb == pytest.approx(-160, abs=2)
    assert effect["pinned tensors not rounded up (untested)"].host_change_gb < -80
    assert effect["50% of Adam on the CPU"].gpu_change_gib > 20


def test_an_object_store_of_rays_default_size_is_seen():
    large = PRO_GB200._replace(layout=None, levers=PRO_GB200.levers._replace(object_store_gib=300))
    shown = plan(large)
    assert shown.verdict.verdict == "tight"
    assert any("object store at 32 GiB" in lever.change for lever in levers(shown))


def test_an_object_store_larger_than_the_node_is_a_no():
    verdict = plan(PRO_GB200._replace(levers=PRO_GB200.levers._replace(object_store_gib=4096))).verdict
    assert verdict.verdict == "no"
    assert "host: ray.object_store_gib=4096 is more than the node has" in verdict.reasons


def test_search_proposes_legal_layouts_best_first():
    now = plan(PRO_GB200)
    found = compared(search(PRO_GB200, BUILT_IN), now)
    words = [("fit", "tight", "no").index(x.verdict) for x in found]
    assert words == sorted(words)
    assert found[0].verdict == "fit"
    assert found[0].question.parallel == PRO_GB200.parallel
    for x in found:
        assert evaluate(x.question, BUILT_IN) == x.plan
        assert x.real == (x.gain_s > 0.1 * now.step.steady_s)
    text = render_search(found, now, PRO_GB200)
    assert "parallel.actor.layout=null" in text
    assert text.count("wrong if") == len(found)


def test_a_gain_within_the_models_error_is_none():
    now = plan(PRO_H100)
    barely = Candidate(plan(PRO_H100._replace(layout="Et*4|(tt|)*26(t|)*4tL")))
    assert gain(compared((barely,), now)[0]) == "no gain in time beyond the model's error"


def test_search_takes_the_levers_that_48_nodes_need():
    asked = PRO_GB200._replace(layout=None, parallel=PRO_GB200.parallel._replace(nodes=48))
    found = search(asked, BUILT_IN)
    assert found[0].verdict in ("fit", "tight")
    assert all(x.question.levers.precision_aware for x in found if x.verdict != "no")
    alone = search(asked, BUILT_IN, with_levers=False)
    assert alone[0].verdict == "no"


def test_a_search_spends_memory_that_is_left_on_time():
    roomy = PRO_GB200._replace(layout=None, work=PRO_GB200.work._replace(sequences=2048))
    found = search(roomy, BUILT_IN, keep=400)
    longer = [x for x in found if x.question.work.micro_batch_tokens > roomy.work.micro_batch_tokens]
    assert longer
    assert min(x.plan.step.steady_s for x in longer) < plan(roomy).step.steady_s
    short = flash_sft(GB300, 8, 4)._replace(work=Work(64, 512, 512, 1024))
    kept = [x for x in search(short, BUILT_IN, keep=400) if not x.question.training.recompute]
    assert kept
    assert min(x.plan.step.steady_s for x in kept) < plan(short).step.steady_s


def test_a_search_makes_activations_again_where_that_is_what_it_takes():
    asked = PRO_H100._replace(training=PRO_H100.training._replace(recompute=False))
    assert plan(asked).verdict.verdict == "no"
    found = search(asked, BUILT_IN)
    assert found[0].verdict == "fit"
    assert all(x.question.training.recompute for x in found if x.question.parallel == asked.parallel)


def test_batches_of_a_fixed_number_of_sequences_keep_their_tokens():
    asked = PRO_H100._replace(work=PRO_H100.work._replace(sequences=2048, packed=False))
    tokens = asked.work.micro_batch_tokens
    assert {x.question.work.micro_batch_tokens for x in search(asked, BUILT_IN, keep=100)} <= {tokens, tokens // 2}


def test_the_first_five_lines_say_verdict_cost_and_loss(capsys):
    for words in (["--hw=h100"], ["--hw=h100", "--nodes=8"], ["--hw=gb300"]):
        cli_run(words)
        first = capsys.readouterr().out.splitlines()[:5]
        assert [sum(line.startswith(word) for line in first) for word in ("VERDICT:", "COST:", "RESUMES:")] == [1, 1, 1]


def test_a_recommendation_comes_with_the_command_that_takes_it(capsys):
    cli_run(["--hw=gb200", "--save-freq=200", "--set=data.max_prompt_length=1024"])
    shown = capsys.readouterr().out
    assert "now 200: loses least to saves and failures\n" in shown
    assert "dsv4kit submit --hw gb200 --save-freq " in shown
    assert "--set data.max_prompt_length=1024" in shown
    cli_run(["--hw=gb200", "--save-freq=200", "--json"])
    assert "--save-freq" in json.loads(capsys.readouterr().out)["recommended"][0]["command"]


def test_days_have_an_interval():
    for asked in (PRO_H100, PRO_GB200, flash_sft(GB300, 8, 4, mtp=True)):
        shown = plan(asked)
        low, high = shown.days_interval
        assert low < shown.segment.days < high


def test_what_lies_outside_the_measured_runs_is_named():
    assert plan(PRO_GB200).memory_extrapolated == ()
    longer = plan(PRO_GB200._replace(work=PRO_GB200.work._replace(response_tokens=16384, micro_batch_tokens=18432)))
    assert longer.memory_extrapolated == ("response tokens 16384 (measured: 4096 to 8192)",)
    wide = PRO_GB200._replace(layout=None, parallel=PRO_GB200.parallel._replace(expert=32, pipeline=8))
    assert plan(wide).memory_extrapolated == ("EP 32 (measured: 8 to 16)",)


def test_a_layout_is_the_same_however_it_is_written():
    written = PRO_GB200._replace(layout="Etttt|(t*4|)*12(ttt|)*2ttt*1L")
    assert plan(written).step_extrapolated == ()


def test_a_rollout_whose_room_depends_on_estimates_is_tight():
    shown = plan(PRO_H100._replace(rollout=PRO_H100.rollout._replace(utilization=0.36)))
    assert shown.memory.rollout.word == "tight"
    assert shown.verdict.verdict != "fit"


def test_the_least_nodes_for_flash_sft():
    asked = flash_sft(H100, 4, 4, mtp=True)
    least = least_nodes(asked, BUILT_IN, lambda q: True)
    assert least is not None
    assert 8 < least <= 16
    there = asked._replace(parallel=asked.parallel._replace(nodes=least))
    assert search(there, BUILT_IN, with_levers=False)[0].verdict != "no"


def test_a_search_at_1024_nodes_is_quick():
    asked = PRO_H100._replace(parallel=PRO_H100.parallel._replace(nodes=1024))
    began = time.process_time()
    assert search(asked, BUILT_IN)
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    "words",
    [
        ("--hw=h100", "--model=dsv4-flash", "--recipe=sft", "--nodes=4"),
        *(("--hw=gb200", f"--nodes={n}") for n in (8, 16, 32, 48, 96)),
    ],
)
def test_there_is_always_an_answer(words, capsys, monkeypatch):
    monkeypatch.setattr(node_counts, "least_nodes", lambda *_: 7)
    assert cli.run(arguments(*words)) == 3
    out = capsys.readouterr().out
    assert out.startswith("as it stands this is refused: NODES=")
    assert "planned instead: SET=" in out
    assert "VERDICT: " in out
    if "DOES NOT FIT" in out:
        assert "7 nodes is the least that fits" in out


def test_a_refusal_is_json_too(capsys):
    with pytest.raises(UserError) as error:
        cli.run(arguments("--hw=h100", "--set=parallel.actor.expert_parallel_size=5", "--json"))
    assert json.loads(capsys.readouterr().out) == {"verdict": None, "refused": str(error.value)}
    assert cli.run(arguments("--hw=gb200", "--nodes=96", "--json")) == 3
    assert json.loads(capsys.readouterr().out)["refused"].startswith("NODES=96")


def test_side_by_side_are_plans_of_one_model(capsys):
    """GB300's own default is another model than H100's."""
    assert cli.run(arguments("--compare=h100:64,gb300:64")) == 0
    assert capsys.readouterr().out.startswith("all of them: dsv4-pro grpo\n")


def test_hardware_side_by_side(capsys):
    words = ("--model=dsv4-pro", "--recipe=grpo", "--compare=h100:64,gb200:64,gb200:96,gb200:1")
    assert cli.run(arguments(*words)) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert title == "all of them: dsv4-pro grpo"
    assert [row.split()[1] for row in rows[1:3]] == ["fit", "fit"]
    assert rows[3].startswith("gb200:96*")
    assert rows[4].split()[1] == "no"
    assert cli.run(arguments(*words, "--json")) == 0
    assert len(json.loads(capsys.readouterr().out)["compared"]) == 4


def test_the_least_nodes_by_the_verb(capsys):
    assert cli.run(arguments("--hw=gb300", "--min-nodes")) == 0
    assert "nodes of gb300 is the least that fits: " in capsys.readouterr().out


def test_search_finds_a_rollout_that_fits():
    broken = PRO_H100._replace(rollout=RolloutSplit(8, 4, 32))
    assert search(broken, BUILT_IN)[0].question.rollout.gpus >= 64


def test_racks():
    assert slurm_segment(PRO_GB200) == 16
    assert slurm_segment(PRO_H100) is None
    assert slurm_segment(PRO_GB200._replace(parallel=PRO_GB200.parallel._replace(nodes=62))) == 0
    assert any("--segment=16" in warning for warning in plan(PRO_GB200).verdict.warnings)


def test_switched_off_nvlink_between_nodes_is_said():
    asked = PRO_GB200._replace(env=(("NCCL_CUMEM_ENABLE", "0"),))
    assert any("NCCL_CUMEM_ENABLE" in warning for warning in plan(asked).verdict.warnings)
    assert not any("NCCL_CUMEM_ENABLE" in warning for warning in plan(PRO_H100).verdict.warnings)


def test_offloading_nothing_is_said():
    asked = PRO_GB200._replace(levers=Levers(cpu_offload=True, offload_fraction=0))
    assert any("offloads nothing" in warning for warning in plan(asked).verdict.warnings)


def arguments(*words):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    parser.set_defaults(verb="plan")
    return parser.parse_args(words)


def test_the_verb_on_the_tiny_profile(capsys):
    assert cli.run(arguments("--hw", "cpu")) == 0
    assert "nothing to plan" in capsys.readouterr().out
    assert cli.run(arguments("--hw", "cpu", "--json")) == 0
    assert json.loads(capsys.readouterr().out) == {"verdict": None}


def test_the_verb_without_hardware_names_what_there_is():
    with pytest.raises(UserError, match=r"HW is not set; known: .*gb200"):
        cli.run(arguments())


def test_exit_code_3_where_it_does_not_fit(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("DSV4KIT_CONFIG", str(tmp_path))
    for asked, code in ((("--hw=h100", "--set=hardware.hbm_usable_gib=40"), 3), (("--hw=gb200",), 0)):
        for words in ((), ("--json",), ("--explain",)):
            assert cli.run(arguments(*asked, *words)) == code
            assert capsys.readouterr().out
