"""The planner's constants, each with its unit, source and kind; a site's own fitted ones replace them by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dsv4kit import yaml_text
from dsv4kit.errors import UserError

BUILT_IN = Path(__file__).with_name("coefficients.yaml")

# Hardware no run was published on takes the constants of the most similar hardware; such times are
# marked as extrapolated.
NEAREST = {"h100": "h100", "h200": "h100", "gb200": "gb200", "b200": "gb200", "gb300": "gb200"}


class Coefficient(NamedTuple):
    """One constant; `low` and `high` are the interval it is believed to lie in, none for what is derived."""

    value: float
    unit: str
    kind: Literal["derived", "fitted", "guessed"]
    source: str
    low: float | None = None
    high: float | None = None


class Coefficients(NamedTuple):
    """All constants by name; `origin` says which site's, where not the built-in ones alone."""

    by_name: Mapping[str, Coefficient]
    origin: str = "built-in"

    def of(self, name: str, variant: str | None = None) -> float:
        """The value of `name`, or of `name.variant`."""
        return self.by_name[f"{name}.{variant}" if variant else name].value

    def for_hardware(self, name: str, hardware: str) -> float:
        """The value for that hardware, or its nearest kin's."""
        return self.of(name, self.kin(name, hardware))

    def kin(self, name: str, hardware: str) -> str:
        """The hardware whose value of `name` is taken: its own, or its nearest kin's."""
        return hardware if f"{name}.{hardware}" in self.by_name else NEAREST.get(hardware, "h100")

    def spread(self, name: str, variant: str | None = None) -> tuple[float, float]:
        """How far the constant may be below and above its value; 0 where no interval is given."""
        x = self.by_name[f"{name}.{variant}" if variant else name]
        return (
            x.value - x.low if x.low is not None else 0.0,
            x.high - x.value if x.high is not None else 0.0,
        )

    def with_values(self, fitted: Mapping[str, Coefficient], origin: str) -> Coefficients:
        """These with some replaced."""
        return Coefficients({**self.by_name, **fitted}, origin)


def read(path: Path) -> dict[str, Coefficient]:
    """Coefficients of one YAML file."""
    try:
        content: Any = yaml_text.parse(path.read_text(encoding="utf-8"))
        return {str(name): Coefficient(**entry) for name, entry in (content or {}).items()}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path}: not a file of coefficients (value, unit, kind, source each): {first}") from None


@lru_cache(maxsize=1)
def built_in() -> Coefficients:
    """The constants that come with the kit."""
    return Coefficients(read(BUILT_IN))
