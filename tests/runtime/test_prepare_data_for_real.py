"""Data prepared for real: by the trainer's Python, from files, into Parquet that the kit's own checks accept."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_python import WarmPython

from dsv4kit.config.loading import Override, load_settings
from dsv4kit.feasibility import data_checks
from dsv4kit.prepare import data

REPOSITORY = Path(__file__).resolve().parents[2]
READ = "import json, sys, pyarrow.parquet as p; print(json.dumps(p.read_table(sys.argv[1]).to_pylist()))"
WRITE = """
import json, sys, pyarrow, pyarrow.parquet
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(json.loads(sys.argv[1])), sys.argv[2])
"""

Prepare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def prepare(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """`dsv4kit prepare data`, as a user calls it; no test asks a hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-cache"))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [REPOSITORY / ".venv/bin/python", "-m", "dsv4kit.cli.main", "prepare", "data", *words]
        return subprocess.run(
            [*command, f"--with-python={python}"], capture_output=True, text=True, cwd=REPOSITORY, timeout=300
        )

    return run


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gsm8k(number: int) -> dict[str, Any]:
    return {"question": f"What is {number} + 1?", "answer": f"One more.\n#### {number + 1}"}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the original of GSM8K looks like: 40 training rows of which one stands twice and one has no answer."""
    train = [*(gsm8k(number) for number in range(40)), gsm8k(3), {"question": "Why?", "answer": "Because."}]
    lines(tmp_path / "copy" / "train.jsonl", train)
    lines(tmp_path / "copy" / "test.jsonl", [gsm8k(number) for number in (7, 100, 101)])
    return tmp_path / "copy"


def rows(warm: WarmPython, path: Path) -> list[dict[str, Any]]:
    ran = warm.run(READ, path)
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def problems(recipe: str, train: Path, test: Path) -> list[str]:
    """What `submit` would say against these files."""
    files = {"train_files": [str(train)], "val_files": [str(test)], "train_batch_size": 8}
    overrides = [Override(f"data.{key}", value, key) for key, value in files.items()]
    resolved = load_settings("cpu", "tiny", recipe, [*overrides, Override("reward.function_path", None, "")])
    return data_checks.examine(resolved.settings, resolved.sources).problems


def test_a_known_data_set_from_a_local_copy_for_both_recipes(
    prepare: Prepare, warm: WarmPython, copy: Path, tmp_path: Path
) -> None:
    done = prepare("--data=gsm8k", "--format=grpo", f"--from={copy}", f"--out={tmp_path / 'grpo'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train: 40 rows of 42 read, form grpo" in done.stdout
    assert "train: dropped 1: the same as an earlier row" in done.stdout
    assert "train: dropped 1: no '####' in the answer" in done.stdout
    assert "questions of test that train has too: 1" in done.stdout
    grpo = rows(warm, tmp_path / "grpo" / "train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in grpo] == [str(number + 1) for number in range(40)]
    assert problems("grpo", tmp_path / "grpo" / "train.parquet", tmp_path / "grpo" / "test.parquet") == []

    done = prepare("--data=gsm8k", "--format=sft", f"--from={copy}", f"--out={tmp_path / 'sft'}")
    assert done.returncode == 0, done.stdout + done.stderr
    sft = rows(warm, tmp_path / "sft" / "train.parquet")
    assert set(sft[0]) == {"messages"}
    assert sft[0]["messages"][1] == {"role": "assistant", "content": "One more.\n#### 1"}
    assert problems("sft", tmp_path / "sft" / "train.parquet", tmp_path / "sft" / "test.parquet") == []
    assert any(
        "`messages` makes it data for SFT" in line
        for line in problems("grpo", *[tmp_path / "sft" / "train.parquet"] * 2)
    )


def test_rows_in_verls_form_from_parquet_lose_their_copies(prepare: Prepare, warm: WarmPython, tmp_path: Path) -> None:
    table = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"Problem {number % 5}", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(number % 5), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b"},
        }
        for number in range(15)
    ]
    source = tmp_path / "dapo" / "dapo-math-17k.parquet"
    source.parent.mkdir()
    assert warm.run(WRITE, json.dumps(table), source).returncode == 0
    done = prepare("--data=dapo-math-17k", "--format=grpo", f"--from={source.parent}", f"--out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train: dropped 10: the same as an earlier row" in done.stdout
    made = rows(warm, tmp_path / "out" / "train.parquet")
    assert [(row["reward_model"]["ground_truth"], row["extra_info"]["index"]) for row in made] == [
        (str(number), number) for number in range(5)
    ]
    assert not (tmp_path / "out" / "test.parquet").exists()


def test_the_seed_decides_and_lengths_are_the_trainers_tokens(
    prepare: Prepare, warm: WarmPython, tmp_path: Path, python: Path
) -> None:
    from dsv4kit.sandbox.runtime import assets_dir

    own = lines(tmp_path / "own.jsonl", [{"q": f"Question {n}" + " more" * n, "a": n} for n in range(30)])
    words = [f"--data={own}", "--format=grpo", "--columns=question=q,answer=a", "--data-source=math", "--test-rows=5"]
    words.append("--rows=10")
    outs = []
    for name, seed in (("one", "7"), ("two", "7"), ("three", "8")):
        done = prepare(*words, f"--seed={seed}", f"--out={tmp_path / name}")
        assert done.returncode == 0, done.stdout + done.stderr
        outs.append([(tmp_path / name / f"{split}.parquet").read_bytes() for split in ("train", "test")])
    assert outs[0] == outs[1]
    assert outs[0] != outs[2]
    taken = [
        {row["reward_model"]["ground_truth"] for row in rows(warm, tmp_path / "one" / f"{split}.parquet")}
        for split in ("train", "test")
    ]
    assert [len(answers) for answers in taken] == [10, 5]
    assert not taken[0] & taken[1]
    model = assets_dir(python) / "model"
    done = prepare(*words[:-2], f"--tokenizer={model}", "--max-tokens=100", f"--out={tmp_path / 'short'}")
    assert "longer than 100 tokens" in done.stdout, done.stdout + done.stderr
    statistics = json.loads((tmp_path / "short" / "statistics.json").read_text())
    assert statistics["unit"] == "tokens"
    assert 20 < statistics["files"]["train"]["lengths"]["greatest"] <= 100


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (
            '{"question": "a", "answer": "1"}\n{"question": ["b"], "answer": "1"}\n',
            [],
            "line 2: `question` is a list, not text",
        ),
        ('{"question": "a", "answer": ""}\n', [], "train: of 1 rows none is left (1: the answer is empty)"),
        ('{"text": "a"}\n', [], "line 1: GRPO needs `prompt`, or a question"),
        ("", [], "own.jsonl: is empty"),
        (None, [], "own.parquet: cannot be read as Parquet"),
        (
            '{"question": "a", "answer": "1"}\n',
            ["--test-rows=1"],
            "TEST_ROWS=1 and ROWS=all: there are 1 different rows",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line_and_leaves_nothing(
    prepare: Prepare, tmp_path: Path, content: str | None, words: list[str], message: str
) -> None:
    own = tmp_path / ("own.jsonl" if content is not None else "own.parquet")
    own.write_text("PAR1 and nothing else" if content is None else content)
    done = prepare(f"--data={own}", "--format=grpo", "--data-source=math", f"--out={tmp_path / 'out'}", *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("hub")] == [own.name]


def test_a_hub_that_cannot_be_reached_is_one_line(prepare: Prepare, tmp_path: Path) -> None:
    done = prepare("--data=gsm8k", "--format=grpo", f"--out={tmp_path / 'out'}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "openai/gsm8k: the hub does not give it: " in done.stderr
    assert "FROM=DIRECTORY takes a local copy" in done.stderr


def test_an_interrupted_preparation_leaves_nothing(python: Path, tmp_path: Path) -> None:
    from dsv4kit.prepare.work import Request

    own = lines(tmp_path / "own.jsonl", [{"question": f"{n}", "answer": "1"} for n in range(10)])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho begun\nexec {python} "$@"\n')
    program.chmod(0o755)
    request = Request("", "grpo", files={"train": [str(own)]}, data_source="math")
    with pytest.raises(KeyboardInterrupt):
        data.prepare(request, tmp_path / "out", [str(program)], interrupted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.jsonl", "python"]
