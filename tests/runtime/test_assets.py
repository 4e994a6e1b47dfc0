"""The tiny model and data: the same bytes every time, whole or not there, and what verl needs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from warm_python import WarmPython

from dsv4kit.sandbox.runtime import MAKE_ASSETS

READ = """
import json, sys
import pyarrow.parquet as parquet
from transformers import AutoConfig, AutoTokenizer

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
rows = {name: parquet.read_table(f"{folder}/{name}.parquet").to_pylist() for name in ("train", "test", "sft")}
prompts = [row["prompt"] for row in rows["train"]]
chats = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) for prompt in prompts]
text = "".join(prompt[0]["content"] for prompt in prompts)
print(json.dumps({
    "rows": {name: len(table) for name, table in rows.items()},
    "train": rows["train"][0],
    "sft": rows["sft"][0],
    "indices": [row["extra_info"]["index"] for row in rows["train"]],
    "longest": max(len(tokenizer(chat)["input_ids"]) for chat in chats),
    "text": text,
    "same_after_tokens": tokenizer.decode(tokenizer(text)["input_ids"]) == text,
    "digits": sum(any(c.isdigit() for c in tokenizer.decode([i])) for i in range(len(tokenizer))),
    "vocabulary": AutoConfig.from_pretrained(folder + "/model").vocab_size,
}))
"""


def make(python: Path, out: Path) -> None:
    ran = subprocess.run([python, MAKE_ASSETS, out], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.fixture(scope="module")
def assets(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("assets") / "first"
    ran = warm.run(MAKE_ASSETS, out)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_same_bytes_on_a_second_run(assets: Path, python: Path) -> None:
    make(python, assets.with_name("second"))
    first, second = contents(assets), contents(assets.with_name("second"))
    assert {name: first[name] == second[name] for name in first} == dict.fromkeys(second, True)
    assert {"train.parquet", "test.parquet", "sft.parquet", "model/config.json", "model/model.safetensors"} <= set(
        first
    )
    assert [path.name for path in sorted(assets.parent.iterdir())] == ["first", "second"]  # no temporary is left


def test_what_is_there_is_left_alone(assets: Path, python: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    make(python, tmp_path / "mine")
    assert not any((tmp_path / "mine").iterdir())


def test_contents_are_what_a_run_needs(assets: Path, warm: WarmPython) -> None:
    ran = warm.run(READ, assets)
    assert ran.returncode == 0, ran.stderr[-2000:]
    read = json.loads(ran.stdout)
    assert read["rows"] == {"train": 512, "test": 16, "sft": 256}
    assert set(read["train"]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert read["train"]["reward_model"]["style"] == "rule"
    assert read["indices"] == list(range(512))
    assert [turn["role"] for turn in read["sft"]["messages"]] == ["user", "assistant"]
    assert read["longest"] <= 96  # data.max_prompt_length of the CPU profile
    assert all(awkward in read["text"] for awkward in ('"', "'", "$", "`", "\n", "\\", "{", "世界", "🙂"))
    assert read["same_after_tokens"]
    assert read["digits"] == 10  # so that an untrained model writes few
    assert read["vocabulary"] == 320
