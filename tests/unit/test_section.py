"""Typed sections: what each kind of annotation takes and refuses, and where a mistake is said to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from dsv4kit.config.section import NUMBER, NUMBER_IN_TEXT, WHOLE, Problem, Section
from dsv4kit.config.section import problem as most_telling


def _even(value: int) -> int:
    if value % 2:
        raise ValueError("odd")
    return value


def _upper(value: str) -> str:
    if not value.strip():
        raise ValueError("no name")
    return value.upper()


class Inner(Section):
    number: Annotated[int, Field(ge=1, le=10), WHOLE]
    name: str | None = None


class Outer(Section):
    inner: Inner
    share: Annotated[float, Field(gt=0, le=1), NUMBER] = 0.5
    flag: bool = Field(default=False, description="a flag")
    word: Literal["one", "two"] = "one"
    count: Annotated[Literal[2, 4], NUMBER_IN_TEXT] = 2
    items: list[Annotated[int, AfterValidator(_even), WHOLE]] = Field(default=[2])
    lower: Annotated[str, BeforeValidator(lambda value: value.lower()), AfterValidator(lambda v: v.strip())] = "X "
    table: dict[Annotated[str, AfterValidator(_upper)], Any] = Field(default={})

    def rules(self) -> Iterator[tuple[str, str]]:
        if self.flag and self.word == "two":
            yield "word", "not with flag"


def outer(**values: object) -> Outer:
    return Outer.model_validate({"inner": {"number": 3}, **values})


def mistake_in(tree: object) -> Problem:
    with pytest.raises(ValidationError) as error:
        Outer.model_validate(tree)
    return most_telling(Outer, error.value)


def problem(**values: object) -> Problem:
    return mistake_in({"inner": {"number": 3}, **values})


def test_values_of_every_kind() -> None:
    made = outer(share="0.25", flag="no", word="two", count="4", items=["4", 6.0], table={"a.b": None})
    assert made.model_dump() == {
        "inner": {"number": 3, "name": None},
        "share": 0.25,
        "flag": False,
        "word": "two",
        "count": 4,
        "items": [4, 6],
        "lower": "x",
        "table": {"A.B": None},
    }
    assert Outer.model_validate(made.model_dump()) == made


def test_defaults_are_checked_and_belong_to_one_section_only() -> None:
    assert (outer().lower, outer().share) == ("x", 0.5)
    assert outer().items is not outer().items


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "at least 1"),
        (11, "at most 10"),
        ("x", "not a whole number"),
        ("1.5", "not a whole number"),
        (1.5, "not a whole number"),
        (True, "not a whole number"),
        (None, "not a whole number"),
        ([1], "not a whole number"),
        ("9" * 9999, "not a whole number"),
        ("٣", "not a whole number"),
        (float("nan"), "not a whole number"),
        (float("inf"), "not a whole number"),
    ],
)
def test_whole_numbers(value: object, message: str) -> None:
    found = problem(inner={"number": value})
    assert (found.location, found.value) == (("inner", "number"), value) or value != value
    assert message in found.message


@pytest.mark.parametrize("value", ["x", "nan", "inf", float("nan"), True, None, [], "0", 1.01, 10**400])
def test_numbers(value: object) -> None:
    assert problem(share=value).location == ("share",)


@pytest.mark.parametrize("value", ["perhaps", 2, 0.5, None, "", []])
def test_yes_or_no(value: object) -> None:
    assert "neither true nor false" in problem(flag=value).message


def test_choices_name_the_nearest() -> None:
    assert problem(word="twoo").message == "none of one, two (did you mean 'two'?)"
    assert problem(count=True).location == problem(count=3).location == ("count",)


def test_lists_and_tables_name_the_place() -> None:
    assert problem(items=[2, 3]).location == ("items", 1)
    assert (problem(items=[2, 3]).value, problem(items=[2, 3]).message) == (3, "odd")
    assert problem(table={" ": 1}) == Problem(("table", " "), " ", "no name", "value")
    assert "not a list" in problem(items="2").message
    assert "not keys and values" in problem(table=[1]).message
    assert "not keys and values; keys here: name, number" in problem(inner=None).message


def test_text_is_text() -> None:
    assert "not a text" in problem(inner={"number": 1, "name": 5}).message


def test_what_is_there_and_wrong_is_said_before_what_is_not_there() -> None:
    found = mistake_in({"flg": True})
    assert (found.kind, found.location) == ("unknown", ("flg",))
    assert "(did you mean 'flag'?)" in found.message
    assert mistake_in({}) == Problem(("inner",), None, "not set", "missing")
    assert problem(inner={"number": 0}, word="three").location == ("word",)


def test_values_are_checked_together_when_each_is_right() -> None:
    assert problem(flag=True, word="two") == Problem(("word",), "two", "not with flag", "value")
    assert problem(flag="x", word="two").location == ("flag",)


def test_a_section_does_not_change_and_a_copy_is_checked() -> None:
    made = outer()
    with pytest.raises(ValidationError, match="frozen"):
        made.flag = True  # type: ignore[misc]
    assert made.model_copy(update={"share": "1"}).share == 1
    assert made.share == 0.5
    for update in ({"share": 2}, {"shore": 1}):
        with pytest.raises(ValidationError):
            made.model_copy(update=update)


def test_a_key_may_have_any_name() -> None:
    for name in ("self", "cls", "__class__", "model_config", "rules", 5, None):
        assert mistake_in({"inner": {"number": 3}, name: 1}).kind == "unknown", name
    found = mistake_in({"inner": {"number": 3, "nme": 1}})
    assert found.message == "no such key; allowed here: name, number (did you mean 'name'?)"
