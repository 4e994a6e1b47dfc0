"""A constant that was fitted to a run, and how it replaces a built-in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dsv4kit.plan.counted.coefficients import Coefficient, Coefficients


class Fitted(NamedTuple):
    """A constant's value, the interval it is believed in, and what it was fitted to."""

    value: float
    low: float
    high: float
    basis: str


def as_coefficients(values: Mapping[str, Fitted], known: Coefficients, source: str) -> dict[str, Coefficient]:
    """The fitted constants in the planner's form."""
    return {
        name: Coefficient(x.value, _unit(name, known), "fitted", f"{source}, {x.basis}", x.low, x.high)
        for name, x in values.items()
    }


def _unit(name: str, known: Coefficients) -> str:
    stem = name.partition(".")[0]
    return next((x.unit for other, x in known.by_name.items() if other == name or other.partition(".")[0] == stem), "")
