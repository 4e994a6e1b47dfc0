"""A model is looked through before a run: every file of the index, the shape the profile counts on, a tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_trees import write

from dsv4kit.cli import main
from dsv4kit.config.loading import Override, geometry_of, load_settings, load_site, names
from dsv4kit.errors import UserError
from dsv4kit.feasibility import file_rules
from dsv4kit.feasibility.case import Case
from dsv4kit.weights import model_check

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """DeepSeek-V4-Pro by its configuration, two tensors by its weights."""
    made = tmp_path / "model"
    geometry = geometry_of("dsv4-pro")
    assert geometry is not None
    shape: dict[str, Any] = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 61,
        "n_routed_experts": 384,
        "compress_ratios": geometry.compress_ratios,
    }
    write(made / "config.json", shape)
    write(made / "tokenizer.json", {"version": "1.0"})
    for name in SHARDS:
        data = json.dumps({"w": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
        write(made / name, len(data).to_bytes(8, "little") + data + bytes(64))
    write(made / "model.safetensors.index.json", {"weight_map": {"w": SHARDS[0]}})
    return made


def prepared(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    return main.run(["prepare", "model", *words]), capsys.readouterr().out


def test_a_whole_model_is_said_to_be_whole(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = prepared(capsys, f"--model-path={model}", "--model=dsv4-pro")
    assert status == 0
    assert said.endswith("deepseek_v4, as dsv4-pro has it; 1 tensors in 1 files, 1.35e-07 GB\n")


def changed(model: Path, **values: object) -> None:
    config = json.loads((model / "config.json").read_text())
    write(model / "config.json", {**config, **values})


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda m: (m / SHARDS[0]).unlink(), f"{SHARDS[0]}: No such file or directory"),
        (lambda m: os.truncate(m / SHARDS[0], 100), "cut short"),
        (lambda m: write(m / SHARDS[0], b""), "not a safetensors file, or cut short at 0 bytes"),
        (
            lambda m: write(m / "model.safetensors.index.json", {"weight_map": {"w": SHARDS[0], "v": SHARDS[0]}}),
            "has no tensor 'v', which model.safetensors.index.json says it has",
        ),
        (lambda m: (m / "tokenizer.json").unlink(), "no tokenizer beside the weights"),
        (lambda m: changed(m, n_routed_experts=256), "n_routed_experts=256: the profile has 384"),
        (lambda m: changed(m, model_type="deepseek_v3"), "model_type='deepseek_v3': deepseek_v4 is needed"),
        (lambda m: changed(m, compress_ratios=[4] * 61), "compress_ratios=[4, 4, 4"),
    ],
)
def test_what_is_wrong_is_one_line_each(
    harm: Callable[[Path], object], said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(model)
    status, shown = prepared(capsys, f"--model-path={model}", "--model=dsv4-pro")
    assert status == 1
    (line,) = shown.splitlines()
    assert line.startswith("problem  ")
    assert said in line


def test_the_last_layers_ratios_may_be_missing_where_nothing_predicts_more_tokens(model: Path) -> None:
    geometry = geometry_of("dsv4-pro")
    assert geometry is not None
    config = {"model_type": "deepseek_v4", "compress_ratios": geometry.compress_ratios[:61]}
    assert list(model_check.shape_problems(config, geometry.model_dump())) == []


def test_every_model_has_a_shape_but_those_the_kit_makes() -> None:
    assert [name for name in names("models") if geometry_of(name) is None] == ["dsv4-tiny", "tiny"]
    four = geometry_of("dsv4-pro-4l")
    assert four is not None
    assert (four.num_layers, four.hidden_size) == (4, 7168)


def test_hashes_are_compared_byte_by_byte(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = hashlib.sha256((model / SHARDS[0]).read_bytes()).hexdigest()
    sums = write(tmp_path / "sums", f"{digest}  ./{SHARDS[0]}\n")
    words = (f"--model-path={model}", f"--hashes={sums}")
    assert prepared(capsys, *words)[0] == 0
    with (model / SHARDS[0]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")  # no size and no header changes
    status, said = prepared(capsys, *words)
    assert status == 1
    assert f"its sha256 is {hashlib.sha256((model / SHARDS[0]).read_bytes()).hexdigest()}, not {digest}" in said


def test_a_hubs_cache_names_its_files_by_their_hashes(model: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256((model / SHARDS[0]).read_bytes()).hexdigest()
    blob = tmp_path / "blobs" / digest
    blob.parent.mkdir()
    (model / SHARDS[0]).rename(blob)
    (model / SHARDS[0]).symlink_to(blob)
    assert model_check.known_hashes(model, "hub") == {SHARDS[0]: digest}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "MODEL_PATH is not set; for instance: dsv4kit prepare model --model-path"),
        (["--model-path=/no/such"], "MODEL_PATH=/no/such: no such directory"),
        (["--model=dsv4-por"], "did you mean 'dsv4-pro'?"),
        (["--model=tiny"], "MODEL=tiny: the kit knows no shape of it"),
        (["--hashes=hub"], "is no snapshot in a hub's cache; HASHES=FILE names sha256sums"),
        (["--hashes=/no/such"], "HASHES=/no/such: No such file or directory"),
    ],
)
def test_what_is_asked_for_wrongly(words: list[str], message: str, model: Path) -> None:
    given = words if not words or words[0].startswith("--model-path") else [f"--model-path={model}", *words]
    with pytest.raises(UserError) as refused:
        main.run(["prepare", "model", *given])
    assert message in str(refused.value)


def test_a_run_whose_weights_are_not_all_there_is_refused(model: Path) -> None:
    def refused() -> list[str]:
        resolved = load_settings("h100", "dsv4-pro", "grpo", [Override("model.path", str(model), "MODEL_PATH=m")])
        case = Case(resolved.settings, resolved.sources, load_site("example-bare"))
        return [refusal.line for refusal in file_rules.whole_model(case)]

    assert refused() == []
    (model / SHARDS[0]).unlink()
    changed(model, num_hidden_layers=43)
    shape, weights = refused()
    assert shape == f"MODEL_PATH=m: {model / 'config.json'}: num_hidden_layers=43: the profile has 61"
    assert weights.startswith(f"MODEL_PATH=m: {SHARDS[0]} of model.safetensors.index.json is missing (1 files are)")
