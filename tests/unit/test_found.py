"""What the packages in an environment do, read from their source, and what a run makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_node import node_spec

from dsv4kit.config.loading import Override, load_settings, load_site
from dsv4kit.feasibility import image_needs, image_rules
from dsv4kit.feasibility.case import Case, ImageFacts
from dsv4kit.feasibility.refusals import refusals
from dsv4kit.image.manifest import FORMAT
from dsv4kit.node import contents, preflight
from dsv4kit.plugin import found, needs
from dsv4kit.plugin.found import PackageFacts
from dsv4kit.run.directory import AttemptDir
from dsv4kit.run.node_files import NodeFiles

# As verl 0.9.1 has it, shortened.
ALWAYS = """
def args(self):
    if self.config.data_parallel_size > 1:
        given = {"data_parallel_size": 8, "data_parallel_start_rank": self.node_rank * 2}
"""
FOLLOWERS = ALWAYS + "        if self.node_rank == 0:\n            given.pop('data_parallel_start_rank')\n"
CHOSEN = ALWAYS.replace("self.node_rank * 2", "1").replace('"data_parallel_start_rank": 1', "**ranks(self)") + (
    "        return {'data_parallel_start_rank': 2} if self.node_rank else {}\n"
)


@pytest.mark.parametrize(("source", "given"), [(ALWAYS, True), (FOLLOWERS, False), (CHOSEN, False), ("x = 1", None)])
def test_whether_the_first_node_gets_a_start_rank_is_read_from_verl(source: str, given: bool | None) -> None:
    assert found.gives_leader_a_start_rank(source) is given


def test_what_fused_attention_wants_is_read_from_megatron() -> None:
    said = 'raise ValueError(\n    f"apply_dsa_kernel_fusion requires SM90+ (Hopper or later), "\n)'
    assert found.fused_attention_from(said) == 90
    assert found.fused_attention_from("assert sm, f\"dsa_kernel_backend='cudnn' requires SM100+\"") == 100
    assert found.fused_attention_from("x = 1") is None


def test_facts_of_a_directory_of_packages(tmp_path: Path) -> None:
    server = tmp_path / "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
    server.parent.mkdir(parents=True)
    server.write_text(ALWAYS + "\ndef set_default_vllm_quantization_backends(): ...\n")
    facts = found.facts(needs.Installed([tmp_path]), "0.29.0")
    assert facts == PackageFacts("0.29.0", True, "deep_gemm", None)


@pytest.mark.parametrize(
    ("facts", "asked", "said"),
    [
        (
            PackageFacts(fused_attention_from=100),
            {"sm": 90, "fused_attention": True},
            "from compute capability 10.0 on",
        ),
        (PackageFacts(fused_attention_from=90), {"sm": 90, "fused_attention": True}, None),
        (PackageFacts(chosen_experts="deep_gemm"), {"sm": 90, "moe_backend": None}, "ROLLOUT_MOE_BACKEND=marlin"),
        (PackageFacts(chosen_experts="deep_gemm"), {"sm": 90, "moe_backend": "marlin"}, None),
        (PackageFacts(chosen_experts="deep_gemm"), {"sm": 100, "moe_backend": None}, None),
        (
            PackageFacts(vllm="0.29.0", leader_start_rank=True),
            {"data_parallel": 8},
            "vLLM 0.29.0 needs a verl with #8234",
        ),
        (PackageFacts(vllm="0.27.0", leader_start_rank=True), {"data_parallel": 8}, None),
        (PackageFacts(vllm="0.29.0", leader_start_rank=True), {"data_parallel": 1}, None),
        (PackageFacts(vllm="0.29.0", leader_start_rank=None), {"data_parallel": 8}, None),
    ],
)
def test_a_clash_is_named_with_what_would_do(facts: PackageFacts, asked: dict[str, object], said: str | None) -> None:
    lines = list(found.clashes(facts, asked))
    assert [said in line for line in lines] == ([True] if said else [])


def test_a_node_whose_python_cannot_train_the_model_says_so_in_one_line(tmp_path: Path) -> None:
    """The real probe, in this Python, which has neither Megatron nor vLLM."""
    wanted = {"model": "dsv4-pro", "recipe": "grpo", "fields": ["use_fused_mhc"], "asked": {"sm": 90}}
    spec = node_spec(tmp_path, needs={**wanted, "stack": "pro-grpo"})
    problems = preflight.check(spec, "127.0.0.1", NodeFiles(AttemptDir(tmp_path), "n1")).problems
    said = [problem for problem in problems if "what is installed" in problem]
    assert len(said) == 1
    assert said[0].startswith("what is installed cannot run grpo of dsv4-pro: ")
    assert "has no field csa_compress_ratios" in said[0]
    assert said[0].endswith("; an image of the stack pro-grpo has all of it")


def test_a_run_without_gpus_looks_for_nothing() -> None:
    assert image_needs.of_run(load_settings("cpu", "tiny", "grpo").settings, []) == {}
    assert contents.problems({}) == []


def test_the_fields_a_run_sets_are_those_of_its_overrides() -> None:
    words = ["++a.megatron.override_transformer_config.use_fused_mhc=false", "trainer.nnodes=1"]
    of_run = image_needs.of_run(load_settings("h100", "dsv4-pro", "grpo").settings, words)
    assert of_run["fields"] == ["use_fused_mhc"]
    assert of_run["asked"] == {"sm": 90, "fused_attention": False, "moe_backend": "marlin", "data_parallel": 8}


def case(manifest: dict[str, object] | None, *words: str, recipe: str = "grpo", model: str = "dsv4-pro") -> Case:
    given = [Override(word.partition("=")[0], word.partition("=")[2], "test") for word in words]
    resolved = load_settings("h100", model, recipe, given)
    image = ImageFacts("/i.sqsh", "x86_64", manifest, FORMAT) if manifest is not None else None
    return Case(resolved.settings, resolved.sources, load_site("example-h100-pyxis"), image)


def inside(**facts: object) -> dict[str, object]:
    return {
        "format": FORMAT,
        "hardware": "h100",
        "features": {"verl": "0.9.1", "contains": {"verl": ["0bd668c"]}},
        "profiles": ["pro-grpo-h100", "flash-sft-h100"],
        "needs": [],
        "facts": PackageFacts()._asdict() | facts,
    }


def lines(asked: Case) -> str:
    return "\n".join(refusal.line for refusal in refusals(asked))


def test_what_is_inside_decides_and_not_the_name_of_its_verl() -> None:
    nobody = "kernels.moe_backend=none"
    assert "deep_gemm" in lines(case(inside(chosen_experts="deep_gemm"), nobody))
    assert "deep_gemm" not in lines(case(inside(chosen_experts=None), nobody))
    assert "#8234" in lines(case(inside(vllm="0.29.0", leader_start_rank=True)))
    assert "#8234" not in lines(case(inside(vllm="0.29.0", leader_start_rank=False)))
    fused = "kernels.dsa_fusion=true"
    assert "the image's Megatron runs fused" in lines(case(inside(fused_attention_from=100), fused))
    assert "fused" not in lines(case(inside(fused_attention_from=90), fused, recipe="sft", model="dsv4-flash"))


def test_fused_attention_on_hopper_goes_with_the_stack_of_grpo_and_not_with_that_of_sft() -> None:
    assert "fused" not in lines(case(None, "kernels.dsa_fusion=true"))
    refused = lines(case(None, "kernels.dsa_fusion=true", recipe="sft", model="dsv4-flash"))
    assert "this recipe's Megatron runs fused sparse attention from compute capability 10.0 on" in refused


def test_an_image_found_unfit_at_its_build_is_refused_with_what_it_lacks() -> None:
    row = {"model": "dsv4-pro", "recipe": "grpo", "ok": False, "missing": ["no module vllm.models.deepseek_v4"]}
    assert "cannot run grpo of dsv4-pro: no module vllm.models.deepseek_v4" in lines(case({**inside(), "needs": [row]}))


def notes(asked: Case) -> list[str]:
    return list(image_rules.unknown(asked.image, asked.settings))


def test_what_cannot_be_known_here_is_said() -> None:
    offloaded = "optimizer.cpu_offload=true"
    said = notes(case(None, offloaded))
    assert ["each node looks" in said[0], "#8235" in said[1]] == [True, True]
    assert notes(case(inside(), offloaded)) == []
