"""Typed sections: what each kind of annotation takes and refuses, and where a mistake is said to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest

from dsv4kit.config.section import Before, Between, Check, Section, SettingError, setting


def _even(value: int) -> int:
    if value % 2:
        raise ValueError("odd")
    return value


class Inner(Section):
    number: Annotated[int, Between(1, 10)]
    name: str | None = None


class Outer(Section):
    inner: Inner
    share: Annotated[float, Between(above=0, most=1)] = 0.5
    flag: bool = setting(default=False, description="a flag")
    word: Literal["one", "two"] = "one"
    count: Literal[2, 4] = 2
    items: list[Annotated[int, Check(_even)]] = [2]  # noqa: RUF012
    lower: Annotated[str, Before(lambda value: value.lower()), Check(lambda value: value.strip())] = "X "
    table: dict[Annotated[str, Check(str.upper)], Any] = {}  # noqa: RUF012

    def rules(self) -> Iterator[tuple[str, str]]:
        if self.flag and self.word == "two":
            yield "word", "not with flag"


def outer(**values: object) -> Outer:
    return Outer.model_validate({"inner": {"number": 3}, **values})


def problem(**values: object) -> SettingError:
    with pytest.raises(SettingError) as error:
        outer(**values)
    return error.value


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
    assert hash(Outer.model_validate(made.model_dump())) == hash(made)


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


@pytest.mark.parametrize("value", ["perhaps", 2, 1.0, None, ""])
def test_yes_or_no(value: object) -> None:
    assert "neither true nor false" in problem(flag=value).message


def test_choices_name_the_nearest() -> None:
    assert problem(word="twoo").message == "none of one, two (did you mean 'two'?)"
    assert problem(count=True).location == problem(count=3).location == ("count",)


def test_lists_and_tables_name_the_place() -> None:
    assert problem(items=[2, 3]).location == ("items", 1)
    assert str(problem(items=[2, 3])) == "items.1=3: odd"
    assert "not a list" in problem(items="2").message
    assert "not keys and values" in problem(table=[1]).message
    assert "not keys and values; keys here: name, number" in problem(inner=None).message


def test_text_is_text() -> None:
    assert "not a text" in problem(inner={"number": 1, "name": 5}).message


def test_what_is_there_and_wrong_is_said_before_what_is_not_there() -> None:
    with pytest.raises(SettingError) as error:
        Outer.model_validate({"flg": True})
    assert (error.value.kind, error.value.location) == ("unknown", ("flg",))
    assert "(did you mean 'flag'?)" in error.value.message
    with pytest.raises(SettingError, match="inner=None: not set"):
        Outer.model_validate({})


def test_values_are_checked_together_when_each_is_right() -> None:
    assert str(problem(flag=True, word="two")) == "word='two': not with flag"
    assert problem(flag="x", word="two").location == ("flag",)


def test_a_section_does_not_change_and_a_copy_is_checked() -> None:
    made = outer()
    with pytest.raises(AttributeError, match="cannot be changed"):
        made.flag = True  # type: ignore[misc]
    assert made.model_copy(update={"share": "1"}).share == 1
    assert made.share == 0.5
    with pytest.raises(SettingError, match="share"):
        made.model_copy(update={"share": 2})
    with pytest.raises(SettingError, match="no such key"):
        made.model_copy(update={"shore": 1})


def test_a_key_may_have_any_name() -> None:
    for name in ("self", "cls", "__class__", "_hints"):
        assert problem(**{name: 1}).kind == "unknown"
