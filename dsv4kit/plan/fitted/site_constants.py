"""The constants to plan with at a site: the built-in ones, and over them what calibration has kept there.

Kept per site below `$DSV4KIT_CONFIG` (default `~/.config/dsv4kit`), run by run, so that a run can be taken out again.
Of several runs the highest memory and the latest times count. The file has a version; what earlier kits wrote has none.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dsv4kit import yaml_text
from dsv4kit.errors import UserError, nearest
from dsv4kit.plan.counted.coefficients import Coefficient, Coefficients, built_in
from dsv4kit.plan.fitted.calibrated import PUBLISHED, Point
from dsv4kit.plan.fitted.fitted_value import Fitted, as_coefficients
from dsv4kit.run.files import write_text

VERSION = 2
_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
# What earlier kits fitted, and no formula has any more; a file that holds them stays readable.
_RETIRED = (
    *("train_s", "train_pipeline_reference", "train_state_reference", "sft_s_per_token_per_gpu"),
    *("update_weights_gb_per_s", "update_weights_shallow_gb_per_s"),
)
_MEMORY = ("host_base_gb", "host_head_extra_gb", "gpu_context_gib")


class SiteConstants(NamedTuple):
    """The constants to plan with at a site, and the measured runs they hold for."""

    coefficients: Coefficients
    points: tuple[Point, ...] = PUBLISHED


class Run(NamedTuple):
    """One run in a calibration file; `point` is None where its model has no geometry."""

    name: str
    point: Point | None
    values: Mapping[str, Fitted]


def path_of(site: str) -> Path:
    """Where the site's own constants are kept."""
    if not _SITE_NAME.match(site):
        raise UserError(f"site {site!r}: a name of letters, digits, '.', '_' and '-' is needed to keep its calibration")
    return _directory() / f"{site}.yaml"


def all_files() -> list[Path]:
    """The calibration files of all sites."""
    return sorted(_directory().glob("*.yaml"))


def _directory() -> Path:
    root = os.environ.get("DSV4KIT_CONFIG")
    try:
        base = Path(root) if root else Path.home() / ".config" / "dsv4kit"
    except RuntimeError:  # a container with a user id of its own, which no passwd knows
        raise UserError("HOME is not set, and this user has no home; DSV4KIT_CONFIG=<directory> does without") from None
    return base / "calibration"


def coefficients_for(site: str | None) -> SiteConstants:
    """The built-in constants with the site's own in place of theirs, where there are any."""
    path = path_of(site) if site and _SITE_NAME.match(site) else None
    if path is None or not path.is_file():
        return SiteConstants(built_in())
    runs = read_runs(path)
    if not runs:
        return SiteConstants(built_in())
    fitted = combined(runs)
    names = ", ".join(run.name for run in runs)
    origin = f"built-in, {len(fitted)} of them fitted at {site} (runs {names})"
    points = tuple(run.point for run in runs if run.point)
    return SiteConstants(built_in().with_values(fitted, origin), (*points, *PUBLISHED))


def combined(runs: Sequence[Run]) -> dict[str, Coefficient]:
    """Of each constant the value that counts."""
    found: dict[str, Coefficient] = {}
    for run in runs:
        for name, x in as_coefficients(run.values, built_in(), f"run {run.name}").items():
            if name.partition(".")[0] in _MEMORY and name in found and found[name].value >= x.value:
                continue
            found[name] = x
    return found


def write_runs(path: Path, site: str, runs: Sequence[Run]) -> None:
    """Writes a site's file; without runs there is none."""
    import yaml

    if not runs:
        path.unlink(missing_ok=True)
        return
    content = [
        {
            "run": run.name,
            "point": run.point._asdict() if run.point else None,
            "values": {
                name: {"value": x.value, "low": x.low, "high": x.high, "basis": x.basis}
                for name, x in run.values.items()
            },
        }
        for run in runs
    ]
    write_text(path, yaml.safe_dump({"version": VERSION, "site": site, "runs": content}, sort_keys=False))


def read_runs(path: Path) -> list[Run]:
    """The runs a calibration file was made from, by this kit or an earlier one."""
    try:
        content: Any = yaml_text.parse(path.read_text(encoding="utf-8"))
        version = content.get("version", 1)
        if isinstance(version, int) and version > VERSION:
            raise UserError(f"{path}: written by a newer kit (version {version}; this one reads up to {VERSION})")
        runs = [_run(entry) for entry in content["runs"]]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (TypeError, KeyError, ValueError, AttributeError):
        raise UserError(
            f"{path}: not a calibration file; `dsv4kit plan --calibrate RUN_DIR` writes a new one"
        ) from None
    for run in runs:
        for name in run.values:
            _known(path, run.name, name)
    return runs


def _run(entry: Mapping[str, Any]) -> Run:
    point = entry["point"]
    values = {
        str(name): _value(value)
        for name, value in entry["values"].items()
        if str(name).partition(".")[0] not in _RETIRED
    }
    return Run(str(entry["run"]), Point(**point) if point is not None else None, values)


def _value(entry: object) -> Fitted:
    """A number alone is what earlier kits kept: its interval is the built-in constant's, as wide."""
    if not isinstance(entry, Mapping):
        entry = {"value": entry, "low": None, "high": None, "basis": "fitted by an earlier kit"}
    value = _number(entry["value"])
    low, high = (value if entry[end] is None else _number(entry[end]) for end in ("low", "high"))
    if not low <= value <= high:
        raise ValueError
    return Fitted(value, low, high, str(entry["basis"]))


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _known(path: Path, run: str, name: str) -> None:
    """Refuses a constant that no formula has, or one per variant that names none."""
    built = built_in().by_name
    stem, _, variant = name.partition(".")
    stems = {other.partition(".")[0] for other in built}
    if stem not in stems:
        raise UserError(f"{path}: run {run}: {name}: no such constant{nearest(stem, stems)}")
    if name not in built and bool(variant) == (stem in built):
        allowed = ", ".join(other for other in built if other.partition(".")[0] == stem)
        raise UserError(f"{path}: run {run}: {name}: no such constant; allowed: {allowed}")
