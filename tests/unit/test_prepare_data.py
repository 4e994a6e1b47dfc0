"""Records become rows in one of verl's two forms; what is wrong with them is said, and nothing is half-made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsv4kit.cli import main
from dsv4kit.errors import UserError
from dsv4kit.prepare import data, forms, named, reading, summary
from dsv4kit.prepare.forms import Dropped, Example, Reader, Wanted
from dsv4kit.prepare.work import Request

GSM = {"question": "How many?", "answer": "Two and two.\n#### 1,004"}
IN_FORM = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": "0e1f"},
}


def read(record: dict[str, Any], form: str = "grpo", first: dict[str, Any] | None = None, **wanted: Any) -> Any:
    reader = Reader(Wanted(form, wanted.pop("columns", {}), **wanted), first or record, "f line 1")
    return reader.read(record, "f line 2")


def test_a_question_becomes_a_prompt_with_its_answer_and_its_reward() -> None:
    asked = read(GSM, data_source="openai/gsm8k", answer_after="####", instruction="End with ####.")
    assert forms.grpo_row(asked, "train", 7) == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "How many? End with ####."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1004"},
        "extra_info": {"split": "train", "index": 7},
    }


def test_for_sft_the_same_question_becomes_a_conversation() -> None:
    row = forms.sft_row(read(GSM, "sft", answer_after="####", instruction="End with ####."))
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["messages"][1]["content"] == GSM["answer"]
    assert row["messages"][0]["content"] == "How many?"


def test_rows_in_verls_form_are_taken_as_they_are() -> None:
    assert read(IN_FORM) == Example([{"role": "user", "content": "1 + 1?"}], "2", "math_dapo")


def test_conversations_keep_roles_and_order() -> None:
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user", "assistant")]
    assert read({"messages": turns}, "sft").messages == turns


@pytest.mark.parametrize(
    ("record", "form", "reason"),
    [
        ({"question": " ", "answer": "1"}, "grpo", "the question is empty"),
        ({"question": "a", "answer": ""}, "grpo", "the answer is empty"),
        ({"question": "a", "answer": None}, "sft", "the answer is empty"),
        ({"messages": []}, "sft", "no message"),
        ({"messages": [{"role": "user", "content": "a"}]}, "sft", "no message of the assistant to learn"),
        ({"messages": [{"role": "user", "content": " "}]}, "sft", "a message is empty"),
        ({**IN_FORM, "reward_model": {"ground_truth": None}}, "grpo", "the answer is empty"),
    ],
)
def test_a_row_without_substance_is_dropped_with_its_reason(record: dict[str, Any], form: str, reason: str) -> None:
    assert read(record, form, data_source="math_dapo") == Dropped(reason)


@pytest.mark.parametrize(
    ("record", "form", "message"),
    [
        ({"messages": []}, "grpo", "`messages` is SFT's: FORMAT=sft"),
        (IN_FORM, "sft", "`prompt` in verl's form is GRPO's: FORMAT=grpo"),
        ({"text": "a", "answer": "b"}, "grpo", "a question (`question` or `problem` or `prompt` or `instruction`); it"),
        (
            {"question": "a"},
            "sft",
            "an answer (`answer` or `solution` or `response` or `ground_truth`); it has question",
        ),
        ({"question": "a", "answer": ["b"]}, "grpo", "f line 2: `answer` is a list, not text"),
        ({"question": {"a": 1}, "answer": "b"}, "grpo", "f line 2: `question` is an object, not text"),
        ({"question": "a", "answer": True}, "grpo", "`answer` is true or false, not text"),
        ({"messages": "hello"}, "sft", "f line 2: `messages`: text, not a list of {role, content}"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "sft", "role 'usr' of message 1; allowed: system, user"),
        ({"messages": [{"role": "user", "content": [1]}]}, "sft", "the content of message 1 is a list, not text"),
        ({"messages": [{"from": "user", "value": "a"}]}, "sft", "message 1 is no {role, content}"),
        ({"question": "a", "answer": "b"}, "grpo", "no `data_source`, which decides the reward; DATA_SOURCE=NAME"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "grpo", "in verl's form, and `reward_model` is missing"),
    ],
)
def test_a_file_of_another_shape_is_refused_with_its_place(record: dict[str, Any], form: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        read(record, form)
    assert message in str(refused.value)
    assert str(refused.value).startswith("f line ")


def test_columns_can_be_called_anything() -> None:
    asked = read({"q": "a", "a": 3}, columns={"question": "q", "answer": "a"}, data_source="math")
    assert (asked.messages[0]["content"], asked.answer) == ("a", "3")
    with pytest.raises(UserError, match=r"COLUMNS question=qq: there is no such column; it has q, a.*did you mean 'q'"):
        read({"q": "a", "a": 3}, columns={"question": "qq", "answer": "a"})


def test_white_space_makes_no_other_row_and_another_answer_does() -> None:
    one, two = (Example([{"role": "user", "content": text}], "1", "") for text in ("a  b", "a\nb "))
    assert forms.key(one) == forms.key(two)
    other = Example(one.messages, "2", "")
    assert forms.key(one) != forms.key(other)
    assert forms.question_key(one) == forms.question_key(other)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "has no rows"),
        (b'{"a": 1}\n{"a": \n', "line 2: no JSON"),
        (b'{"a": 1}\n[1]\n', "line 2: not a JSON object"),
        (b"[{]", "begins like a JSON array and is none"),
        (b"[]", "has no rows"),
        (b'[{"a": 1}, 2]', "item 2: not a JSON object"),
        (b'{"a": "\xff"}', "is not UTF-8 text"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        list(reading.peeked(reading.of_file(path), str(path))[1])
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)


def test_an_array_is_read_like_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1},\n {"a": 2}]')
    assert [record.values["a"] for record in reading.of_file(path)] == [1, 2]


def test_a_local_copy_is_the_hubs_tree_or_the_originals_files(tmp_path: Path) -> None:
    for name in (
        "main/train-0.parquet",
        "main/test-0.parquet",
        "socratic/train-0.parquet",
        ".cache/main/train-1.parquet",
    ):
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).touch()
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "test.jsonl").touch()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "dapo-math-17k.parquet").touch()

    def found(copy: str, split: str) -> list[str]:
        files = reading.files_of_copy(tmp_path / copy, "main", split)
        return [str(path.relative_to(tmp_path / copy)) for path in files]

    assert found("hub", "train") == ["main/train-0.parquet"]
    assert found("original", "test") == ["test.jsonl"]
    assert found("one", "train") == ["dapo-math-17k.parquet"]
    (tmp_path / "hub" / "main" / "train-0.parquet").unlink()
    with pytest.raises(UserError, match=r"no file of the split 'train'; files with data: .*main/test-0"):
        found("hub", "train")
    with pytest.raises(UserError, match="no such file or directory"):
        found("nowhere", "train")


def test_the_spread_of_lengths() -> None:
    spread = summary.spread(range(1, 101))
    assert spread == {"least": 1, "median": 50, "p95": 95, "greatest": 100, "mean": 50.5}
    assert summary.spread([]) == {}


def test_named_sets_go_by_a_reward_that_verl_has() -> None:
    from dsv4kit.feasibility.data_checks import reward_problem

    assert [reward_problem(known.data_source) for known in named.BY_NAME.values()] == [None] * len(named.BY_NAME)


def test_a_named_set_is_read_by_its_own_columns_whatever_the_form() -> None:
    for form in forms.FORMS:
        assert Request("", form, "gsm8k").wanted.columns == {"question": "question", "answer": "answer"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "DATA is not set; for instance: dsv4kit prepare data --data gsm8k --format grpo --out data/gsm8k"),
        (["--data=gsm8k", "--out=x"], "FORMAT is not set"),
        (["--data=gsm8k", "--format=gpro", "--out=x"], "FORMAT='gpro': unknown; grpo has `prompt`"),
        (["--data=gsm9k", "--format=grpo", "--out=x"], "DATA='gsm9k': neither a known data set nor a file"),
        (["--data=GSM8K", "--format=grpo", "--out=x"], "(did you mean 'gsm8k'?)"),
        (["--data=/none.jsonl", "--format=sft", "--out=x"], "/none.jsonl: no such file"),
        (["--data=dapo-math-17k", "--format=sft", "--out=x"], "no worked solutions"),
        (["--data=aime-2024", "--format=grpo", "--out=x", "--rows=3"], "is for validation and has no training data"),
        (["--data=gsm8k", "--format=grpo", "--out=x", "--test-rows=3"], "there is test data besides"),
        (["--data=gsm8k", "--format=grpo", "--out=x", "--rows=0"], "ROWS='0': not a whole number of 1 or more"),
        (["--data=gsm8k", "--format=grpo", "--out=x", "--max-tokens=9"], "tokens are counted by TOKENIZER=DIRECTORY"),
        (["--data=gsm8k", "--format=grpo", "--out=x", "--tokenizer=/no"], "TOKENIZER=/no: no such directory"),
        (["--data=gsm8k", "--format=grpo", "--out=x", "--columns=anser=x"], "(did you mean 'answer'?)"),
        (["--data=gsm8k", "--format=grpo", "--out=x", "--columns=anser"], "not of the form key=value"),
        (["--data=gsm8k", "--format=grpo", "--out=x", "--test=y.jsonl"], "goes with a file of your own"),
        (["--data=gsm8k", "--format=grpo", "--out=/no/such/dir"], "there is no directory /no/such"),
        (["--data=gsm8k", "--format=grpo", "--out=/"], "OUT=/: exists already"),
    ],
)
def test_what_is_asked_for_wrongly_starts_nothing(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        main.run(["prepare", "data", "--with-python=/bin/false", *words])
    assert message in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_the_packages_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    request = Request("", "grpo", files={"train": [str(tmp_path / "a.jsonl")]}, data_source="math")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'pyarrow'\" >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(UserError, match="could not prepare the data: ModuleNotFoundError: No module named 'pyarrow'"):
        data.prepare(request, tmp_path / "out", [str(program)], print)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "python"]
