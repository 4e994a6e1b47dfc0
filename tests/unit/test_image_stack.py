"""The stacks: strict, every pin exact and with a reason; and what is refused in one line."""

import re
from pathlib import Path

import pytest
import yaml

from dsv4kit.config.loading import names
from dsv4kit.errors import UserError
from dsv4kit.image import stack as module
from dsv4kit.image.stack import NOT_ON_THE_INDEX, Stack, canonical, stack_for, stacks
from dsv4kit.verl_keys.features import features_of

FROM_INDEX = "    megatron-core:\n      version: 0.19.2\n      role: dependencies\n"
MLA = "b7643bd54521f563b839b98289b5cd048c062ba2"


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """`changed(old, new)`: the stacks from a file with that replaced."""

    def load(old: str, new: str) -> dict[str, Stack]:
        text = module.FILE.read_text()
        assert old in text
        (tmp_path / "stack.yaml").write_text(text.replace(old, new, 1))
        monkeypatch.setattr(module, "FILE", tmp_path / "stack.yaml")
        found: dict[str, Stack] = module.stacks.__wrapped__()
        return found

    return load


def test_s7_d1_every_hardware_has_a_stack_for_what_it_trains_by_default() -> None:
    chosen = {hardware: stack_for(hardware).name for hardware in names("hardware")}
    assert chosen == {
        "b200": "pro-grpo", "cpu": "cpu", "gb200": "pro-grpo", "gb300": "flash-sft", "h100": "pro-grpo",
        "h200": "pro-grpo",
    }  # fmt: skip


def test_s7_the_validated_pins_of_sft() -> None:
    sft = stacks()["flash-sft"]
    assert sft.base.image == "nvcr.io/nvidia/pytorch:26.04-py3"
    assert sft.git["megatron-core"].sha == "ed6b1f65502aec7f2fe27e14a1245c29e435c2a6"
    assert {"fast-hadamard-transform", "flash-mla", "megatron-bridge"} <= sft.git.keys()
    assert "nvidia-cudnn-frontend" in sft.index
    assert {"flash_mla:flash_mla_sparse_fwd", "cudnn:DSA", "fast_hadamard_transform"} <= sft.imports.keys()


def test_p6_the_verl_of_grpo_has_to_have_both_fixes() -> None:
    grpo = stacks()["pro-grpo"]
    assert grpo.git["verl"].contains == ["3dd97a0", "0bd668c"]
    assert list(grpo.variables) == ["VERL_SHA"]
    features = features_of(grpo.verl)
    assert features.vllm_0_28
    assert features.offloaded_resume
    assert grpo.index["vllm"].version == "0.29.0"


def test_the_stacks_of_dsv4_take_megatron_and_bridge_as_one_published_pair_of_commits() -> None:
    grpo, sft = stacks()["pro-grpo"].git, stacks()["flash-sft"].git
    # Megatron-Bridge v0.6.0 and what its .dev.commit says.
    assert grpo["megatron-core"].sha == "43e45e13074f36da68b34c7a189cd997a01d1b41"
    assert grpo["megatron-bridge"].sha == "51885cf132b2814188b6855c25a8588254274c2a"
    assert sft["megatron-core"].sha == "ed6b1f65502aec7f2fe27e14a1245c29e435c2a6"
    assert sft["megatron-bridge"].sha == "3af343edc83e0352ca8c54acfb94766340fbfa2d"


@pytest.mark.parametrize("name", sorted(stacks()))
def test_everything_has_a_reason_and_names_no_moving_thing(name: str) -> None:
    stack = stacks()[name]
    features_of(stack.verl)
    reasons = [stack.base.reason, *stack.system.values(), *stack.overrides.values(), *stack.caps.values()]
    reasons += [each.reason for each in (*stack.index.values(), *stack.git.values(), *stack.imports.values())]
    assert all(len(reason) > 3 for reason in [*reasons, *stack.never.values()])
    assert not {canonical(package) for package in stack.index} & set(NOT_ON_THE_INDEX)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (f"sha: {MLA}", "sha: nv_dev", "pro-grpo: git.flash-mla.sha='nv_dev': a full commit sha has 40"),
        (f"sha: {MLA}", "sha: b7643bd", "git.flash-mla.sha='b7643bd': a full"),
        ("variable: VERL_SHA\n", f"variable: VERL_SHA\n      sha: {MLA}\n", "git.verl.sha.*either a full commit sha"),
        ("{version: 0.29.0,", '{version: ">=0.29",', "index.vllm.version='>=0.29': one exact version"),
        ("    tilelang:", "    apex:", "index=.*'apex' is something else on the package index; take it from git"),
        ("    tilelang:", "    Deep_GEMM:", "index=.*'Deep_GEMM' is something else"),
        ("contains: [3dd97a0,", "contains: [main,", "git.verl.contains.0='main': a commit is"),
        ("contains: [3dd97a0,", "contians: [3dd97a0,", "git.verl.contians: no such key.*did you mean 'contains'"),
        ("role: compile", "role: build", "role='build': none of install, compile"),
        ("    torch: {reason: everything}", "    torch: {}", "imports.torch.reason: not set"),
        ("url: https://github.com/deepseek-ai", "url: git@github.com:deepseek-ai", "git.flash-mla.url="),
        (FROM_INDEX, FROM_INDEX.replace("dependencies", "install"), "pro-grpo: index=.*from the index has no"),
        ("locks: [cpu-torch.txt, cpu-runtime.lock]", "locks: []", "index={}: either packages of the index, or"),
        ("    fast-hadamard-transform: the index", "    vllm: the index", "never.*vllm is asked for under `index`"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(changed, old: str, new: str, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as raised:
        changed(old, new)
    line = str(raised.value)
    assert "\n" not in line
    assert line.startswith("containers/stack.yaml: ")
    assert re.search(said, line), line


def test_an_unknown_stack_or_hardware_is_one_line() -> None:
    with pytest.raises(
        UserError, match=r"STACK='flash': no stack of that name for HW=h100; allowed: pro-grpo, flash-sft"
    ):
        stack_for("h100", "flash")
    with pytest.raises(UserError, match=r"HW='gb20': no such name; .*did you mean 'gb200'"):
        stack_for("gb20")


def test_a_hardware_without_a_stack_for_its_recipe_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hardware_defaults", lambda hardware: {})
    with pytest.raises(UserError, match=r"containers/stack.yaml: no stack for hardware h100"):
        stack_for("h100")


def test_the_file_is_one_document_with_no_key_twice() -> None:
    seen: list[str] = []

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Loader, node: yaml.MappingNode) -> dict[str, object]:
        keys = [key.value for key, _ in node.value]
        seen.extend(key for key in keys if keys.count(key) > 1)
        return dict(yaml.SafeLoader.construct_mapping(loader, node, deep=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    yaml.load(module.FILE.read_text(), Loader=Loader)
    assert seen == []
