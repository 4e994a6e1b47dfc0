"""Data files looked at from the login node: real Parquet files (tests/data/make.py), and broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dsv4kit.config.loading import Override, load_settings
from dsv4kit.feasibility import parquet_footer
from dsv4kit.feasibility.data_checks import DataReport, examine
from dsv4kit.feasibility.parquet_footer import ParquetError

DATA = Path(__file__).parents[1] / "data"


def report(path: Path | str, recipe: str = "grpo", *changes: Override) -> DataReport:
    given_file = Override("data.train_files", [str(path)], f"TRAIN_FILE={path}")
    resolved = load_settings("h100", "dsv4-flash", recipe, [given_file, *changes])
    return examine(resolved.settings, resolved.sources)


def test_schema_rows_and_values_of_a_real_file() -> None:
    footer = parquet_footer.read(DATA / "grpo.parquet")
    assert footer.rows == 16
    assert footer.names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert footer.columns["prompt.role"].type == "BYTE_ARRAY"
    assert footer.columns["extra_info.index"].type == "INT64"
    truth = footer.columns["reward_model.ground_truth"]
    assert (truth.low, truth.high, truth.nulls) == (b"42", b"42", 0)


def test_values_are_those_of_all_row_groups() -> None:
    source = parquet_footer.read(DATA / "grpo-two-groups.parquet").columns["data_source"]
    assert (source.low, source.high) == (b"aime2024", b"math_dapo")


def test_what_the_writer_did_not_note_is_unknown() -> None:
    source = parquet_footer.read(DATA / "grpo-no-statistics.parquet").columns["data_source"]
    assert (source.low, source.high, source.nulls) == (None, None, None)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1PAR1PAR1", b"x" * 100, b'{"prompt": 1}\n' * 9])
def test_what_is_no_parquet_file_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(ParquetError, match="not a Parquet file"):
        parquet_footer.read(tmp_path / "x.parquet")


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_footer_is_an_error_and_never_a_crash(data: st.DataObject) -> None:
    whole = (DATA / "grpo.parquet").read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    footer = bytearray(whole[-8 - length : -8])
    for _ in range(data.draw(st.integers(1, 8))):
        footer[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    try:
        parsed = parquet_footer.parse(bytes(footer))
    except ParquetError:
        return
    assert isinstance(parsed.columns, dict)


def test_good_data_is_let_through() -> None:
    assert report(DATA / "grpo.parquet") == DataReport()
    assert report(DATA / "sft.parquet", "sft") == DataReport()


@pytest.mark.parametrize(
    ("name", "recipe", "expected"),
    [
        ("sft", "grpo", "GRPO needs a column `prompt`; it has messages; `messages` makes it data for SFT"),
        ("grpo", "sft", "SFT needs a column `messages`; it has data_source, prompt, "),
        ("grpo", "sft", "; `prompt` makes it data for GRPO"),
        ("grpo-unknown-source", "grpo", "`data_source` is 'my_own', for which verl has no reward"),
        ("grpo-empty-truth", "grpo", "`reward_model.ground_truth` is empty in some row"),
        ("grpo-null-truth", "grpo", "`reward_model.ground_truth` is missing in 1 rows"),
        ("grpo-number-truth", "grpo", "`reward_model.ground_truth` is INT64, not text"),
        ("grpo-text-prompt", "grpo", "`prompt` must be a list of {role, content}"),
    ],
)
def test_a_refusal_names_file_column_and_reason(name: str, recipe: str, expected: str) -> None:
    found = report(DATA / f"{name}.parquet", recipe).problems
    assert any(expected in text for text in found), found
    assert all(text.startswith(f"TRAIN_FILE={DATA / name}.parquet") and "\n" not in text for text in found)


def test_fewer_rows_than_a_batch() -> None:
    batch = Override("data.train_batch_size", 32, "SET data.train_batch_size")
    assert "16 rows are fewer than a batch of 32" in report(DATA / "grpo.parquet", "grpo", batch).problems[0]


def test_a_reward_of_ones_own_knows_any_source() -> None:
    own = Override("reward.function_path", "/reward.py", "SET reward.function_path")
    assert report(DATA / "grpo-unknown-source.parquet", "grpo", own) == DataReport()


def test_what_cannot_be_seen_from_here_is_a_note() -> None:
    found = report(DATA / "grpo-no-statistics.parquet")
    assert found.problems == []
    assert all("its writer noted no values" in note for note in found.notes)
    assert len(found.notes) == 2
    assert "`data_source` varies" in report(DATA / "grpo-two-groups.parquet").notes[0]


@pytest.mark.parametrize(("name", "content"), [("x.parquet", b"PAR1 not"), ("x.csv", b"prompt\n1\n")])
def test_files_verl_cannot_read(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert len(report(tmp_path / name).problems) == 1


def row(**changes: Any) -> dict[str, Any]:
    good = {
        "prompt": [{"role": "user", "content": "1+1?"}],
        "data_source": "math_dapo",
        "reward_model": {"ground_truth": "2", "style": "rule"},
    }
    return {key: value for key, value in {**good, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (row(prompt=None, messages=[]), "line 2: no `prompt`; `messages` makes it data for SFT"),
        (row(prompt="1+1?"), "line 2: `prompt` must be a list of {role, content}"),
        (row(reward_model={"ground_truth": ""}), "line 2: `reward_model.ground_truth` is missing, empty or not text"),
        (row(data_source=None), "line 2: `data_source` is missing or not text"),
        (row(data_source="mine"), "line 2: `data_source` is 'mine'"),
    ],
)
def test_json_lines(tmp_path: Path, bad: dict[str, Any], expected: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f"{json.dumps(row())}\n{json.dumps(bad)}\n")
    assert expected in report(path).problems[0]
    path.write_text(f"{json.dumps(row())}\n")
    assert report(path) == DataReport()
    assert "verl reads .parquet" in report(path, "sft").problems[0]
