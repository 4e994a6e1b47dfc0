"""Sections of settings: pydantic models that are immutable and closed, and their errors in one line.

    class Schedule(Section):
        steps: Annotated[int, Field(ge=1, le=1000, description="steps of the whole run"), WHOLE]

Importing this costs as much as the rest of a short command, so it is imported where settings are read and not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import Self

from dsv4kit.errors import nearest

# pydantic's type of an error of our own: a rule about several values of a section.
_RULE = "rule"


def _no_flag(value: object) -> object:
    """pydantic reads `true` as 1."""
    if isinstance(value, bool):
        raise ValueError("not a number")
    return value


def _no_flag_or_fraction(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("not a whole number")
    return value


def _number_in_text(value: object) -> object:
    """Options are text, also where one of some numbers is expected."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value


# Marks of numbers, to stand after their bounds: before them they would hide these from the JSON Schema.
WHOLE = BeforeValidator(_no_flag_or_fraction)
NUMBER = BeforeValidator(_no_flag)
# Mark of a Literal of numbers.
NUMBER_IN_TEXT = BeforeValidator(_number_in_text)


class Section(BaseModel):
    """Immutable, and closed to keys it does not know. Every value is checked, defaults too."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, defer_build=True, allow_inf_nan=False)

    def rules(self) -> Iterator[tuple[str, str]]:
        """What is wrong with the values together: key and message. Called when each by itself is right."""
        yield from ()

    @model_validator(mode="after")
    def _together(self) -> Self:
        for key, message in self.rules():
            raise PydanticCustomError(_RULE, "{message}", {"key": key, "message": message, "value": getattr(self, key)})
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """With some values replaced; they are checked, where pydantic takes them as they are."""
        return type(self).model_validate({**self.__dict__, **(update or {})})


class Problem(NamedTuple):
    """One wrong value: where it stands, what it is, and what is allowed.

    `kind`: `value`, `missing` (nothing is there) or `unknown` (no such key).
    """

    location: tuple[str | int, ...]
    value: object
    message: str
    kind: Literal["value", "missing", "unknown"]


def problem(section: type[Section], error: ValidationError) -> Problem:
    """The most telling of the mistakes in what `section` was made from.

    Wrong values come before missing ones, and outer keys before the keys inside them.
    """
    found = [_problem(section, detail) for detail in error.errors(include_url=False)]
    return min(found, key=lambda p: (p.kind == "missing", len(p.location), p.kind != "unknown"))


def _problem(section: type[Section], detail: ErrorDetails) -> Problem:
    location, value, kind = detail["loc"], detail["input"], detail["type"]
    if location[-1:] == ("[key]",):  # a name in a table: pydantic counts it as a place of its own
        location = location[:-1]
    context = detail.get("ctx", {})
    if kind == _RULE:
        return Problem((*location, context["key"]), context["value"], context["message"], "value")
    if kind == "missing":
        return Problem(location, None, "not set", "missing")
    if kind in ("extra_forbidden", "invalid_key"):
        allowed = _keys(_expected(section, location[:-1]))
        near = nearest(str(location[-1]), allowed)
        return Problem(location, value, f"no such key; allowed here: {', '.join(allowed)}{near}", "unknown")
    message = _message(kind, value, context, _expected(section, location)) or detail["msg"]
    return Problem(location, value, message, "value")


def _message(kind: str, value: object, context: Mapping[str, Any], expected: Any) -> str | None:
    """What is allowed, in the kit's words; None for what only pydantic has words for."""
    if kind == "value_error":  # a check of the kit's own, which says it itself
        return str(context["error"])
    if kind == "literal_error":
        known = [str(choice) for choice in get_args(expected)]
        return f"none of {', '.join(known)}{nearest(str(value), known)}"
    if kind in ("model_type", "model_attributes_type"):
        return f"not keys and values; keys here: {', '.join(_keys(expected))}"
    if kind == "finite_number":
        return "not a whole number" if expected is int else "not a number"
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"must be {words} {context[name]:.10g}"
    return next((message for start, message in _TYPES.items() if kind.startswith(start)), None)


_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
# Beginnings of pydantic's types of errors.
_TYPES = {
    "int_": "not a whole number",
    "float_": "not a number",
    "bool_": "neither true nor false",
    "string_": "not a text; YAML takes it for one in quotes",
    "list_": "not a list",
    "dict_": "not keys and values",
}


def _expected(section: type[Section], location: tuple[str | int, ...]) -> Any:
    """What is expected at a location: a Section, `list[...]`, `dict[...]`, a Literal or a plain type."""
    expected: Any = section
    for part in location:
        if isinstance(expected, type) and issubclass(expected, Section):
            expected = _bare(expected.model_fields[str(part)].annotation)
        else:
            expected = _bare(get_args(expected)[-1])
    return expected


def _bare(expected: Any) -> Any:
    """Without marks, and without `| None`."""
    while get_origin(expected) in (Annotated, Union, UnionType):
        expected = next(part for part in get_args(expected) if part is not type(None))
    return expected


def _keys(section: type[Section]) -> list[str]:
    return sorted(section.model_fields)
