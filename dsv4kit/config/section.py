"""Sections of settings: classes whose annotations say what each key takes.

    class Schedule(Section):
        steps: Annotated[int, Between(1, 1000)] = setting(description="steps of the whole run")

The part of pydantic that the schema needs, under pydantic's names, and without its start: that took half of the time
`dsv4kit plan` has for everything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from dsv4kit.errors import nearest

if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform
else:  # only type checkers look at it

    def dataclass_transform(**_):
        return lambda cls: cls


_NEEDED: Any = object()
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_WHOLE = re.compile(r"\s*[-+]?[0-9]{1,30}\s*", re.ASCII)


class Before(NamedTuple):
    """Mark of an annotation: turns what was written into what the type expects."""

    change: Callable[[Any], object]


class Check(NamedTuple):
    """Mark of an annotation: returns the value, or raises ValueError with what is allowed."""

    check: Callable[[Any], object]


class Between(NamedTuple):
    """Mark of an annotation: bounds of a number; `above` is a bound the number must not touch."""

    least: float | None = None
    most: float | None = None
    above: float | None = None


class Default(NamedTuple):
    """What stands in a class for a key's value."""

    value: Any
    description: str


def setting(*, default: Any = _NEEDED, description: str = "") -> Any:
    """A key; without a default it has to be given."""
    return Default(default, description)


class SettingError(ValueError):
    """One wrong value: where it stands, what it is, and what is allowed.

    `kind`: `value`, `missing` (nothing is there) or `unknown` (no such key; `allowed` has those there are).
    """

    def __init__(
        self,
        location: tuple[str | int, ...],
        value: object,
        message: str,
        kind: Literal["value", "missing", "unknown"] = "value",
        allowed: Collection[str] = (),
    ) -> None:
        super().__init__(f"{'.'.join(map(str, location))}={value!r}: {message}" if location else message)
        self.location, self.value, self.message, self.kind, self.allowed = location, value, message, kind, allowed

    def below(self, *outer: str | int) -> SettingError:
        """The same, seen from further out."""
        return SettingError((*outer, *self.location), self.value, self.message, self.kind, self.allowed)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(setting,))
class Section:
    """Immutable, and closed to keys it does not know. Every value is checked, defaults too."""

    _hints: dict[str, Any]

    def __init__(self, /, **values: Any) -> None:  # `self` may be a key that somebody writes
        found, problems = {}, []
        hints = self.model_fields()
        for key in values.keys() - hints.keys():
            allowed = sorted(hints)
            message = f"no such key; allowed here: {', '.join(allowed)}{nearest(key, allowed)}"
            problems.append(SettingError((key,), values[key], message, "unknown", allowed))
        for key, hint in hints.items():
            default = getattr(type(self), key, _NEEDED)
            value = values.get(key, default.value if isinstance(default, Default) else default)
            if key not in values and value is _NEEDED:
                problems.append(SettingError((key,), None, "not set", "missing"))
                continue
            try:
                found[key] = convert(value, hint)
            except SettingError as problem:
                problems.append(problem.below(key))
        self.__dict__.update(found)
        if not problems:
            problems += [SettingError((key,), found[key], message) for key, message in self.rules()]
        if problems:
            raise min(problems, key=lambda problem: (problem.kind == "missing", len(problem.location)))

    def rules(self) -> Iterator[tuple[str, str]]:
        """What is wrong with the values together: key and message. Called when each by itself is right."""
        yield from ()

    @classmethod
    def model_fields(cls) -> Mapping[str, Any]:
        """Key -> type."""
        if "_hints" not in cls.__dict__:
            cls._hints = {k: hint for k, hint in get_type_hints(cls, include_extras=True).items() if k[0] != "_"}
        return cls._hints

    @classmethod
    def model_validate(cls, tree: object) -> Self:
        """The section from a tree of plain values. Raises SettingError for the most telling mistake."""
        made: Self = convert(tree, cls)
        return made

    def model_dump(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        """As a tree of plain values."""
        return {key: _plain(value) for key, value in self.__dict__.items() if key not in exclude}

    def model_copy(self, update: Mapping[str, Any]) -> Self:
        """With some values replaced; they are checked."""
        return type(self)(**{**self.__dict__, **update})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.__dict__.items())})"


def _plain(value: object) -> object:
    if isinstance(value, Section):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def convert(value: Any, expected: Any) -> Any:
    """`value` as the type `expected`. Text is read where a number or a yes or no is expected: options are text."""
    origin = get_origin(expected)
    if expected is Any:
        return value
    if origin is Annotated:
        return _marked(value, expected)
    if origin in (Union, UnionType):
        return _optional(value, get_args(expected))
    if origin is Literal:
        return _choice(value, get_args(expected))
    if origin is list:
        return _list(value, *get_args(expected))
    if origin is dict:
        return _dict(value, *get_args(expected))
    if issubclass(expected, Section):
        return _section(value, expected)
    return _SCALARS[expected](value)


def _marked(value: Any, expected: Any) -> Any:
    for mark in expected.__metadata__:
        if isinstance(mark, Before):
            value = mark.change(value)
    written, value = value, convert(value, expected.__origin__)
    for mark in expected.__metadata__:
        if isinstance(mark, Between):
            _bounded(written, value, mark)
        elif isinstance(mark, Check):
            try:
                value = mark.check(value)
            except ValueError as error:
                raise SettingError((), written, str(error)) from None
    return value


def _bounded(written: object, value: float, bounds: Between) -> None:
    if bounds.above is not None and not value > bounds.above:
        raise SettingError((), written, f"must be greater than {bounds.above:g}")
    if bounds.least is not None and value < bounds.least:
        raise SettingError((), written, f"must be at least {bounds.least:.10g}")
    if bounds.most is not None and value > bounds.most:
        raise SettingError((), written, f"must be at most {bounds.most:.10g}")


def _optional(value: Any, types: tuple[Any, ...]) -> Any:
    (expected,) = (t for t in types if t is not NoneType)  # unions are `X | None` only
    return None if value is None else convert(value, expected)


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if str(value) == str(choice) and not isinstance(value, bool):
            return choice
    known = ", ".join(map(str, choices))
    raise SettingError((), value, f"none of {known}{nearest(str(value), map(str, choices))}")


def _list(value: Any, item: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise SettingError((), value, "not a list")
    return [_at(index, entry, item) for index, entry in enumerate(value)]


def _dict(value: Any, key: Any, item: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise SettingError((), value, "not keys and values")
    return {_at(name, name, key): _at(name, entry, item) for name, entry in value.items()}


def _at(place: str | int, value: Any, expected: Any) -> Any:
    try:
        return convert(value, expected)
    except SettingError as problem:
        raise problem.below(place) from None


def _section(value: Any, expected: type[Section]) -> Section:
    if isinstance(value, expected):
        return value
    if not isinstance(value, Mapping):
        raise SettingError((), value, f"not keys and values; keys here: {', '.join(sorted(expected.model_fields()))}")
    return expected(**{str(key): entry for key, entry in value.items()})


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise SettingError((), value, "not a text; YAML takes it for one in quotes")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise SettingError((), value, "not a whole number")
    return int(value)


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise SettingError((), value, "not a number")
    return number


def _yes_or_no(value: Any) -> bool:
    word = str(value).strip().lower()
    if isinstance(value, bool | int | str) and word in _WORDS:
        return _WORDS[word]
    raise SettingError((), value, "neither true nor false")


_SCALARS: dict[Any, Callable[[Any], Any]] = {str: _text, int: _whole, float: _number, bool: _yes_or_no}
