"""The constants to plan with at a site: the built-in ones, and over them what calibration has kept there.

Kept per site below `$DSV4KIT_CONFIG` (default `~/.config/dsv4kit`). Of several runs the highest memory and the latest
times count.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from dsv4kit import yaml_text
from dsv4kit.errors import UserError, nearest
from dsv4kit.plan.counted.coefficients import Coefficient, Coefficients, built_in
from dsv4kit.plan.fitted.calibrated import PUBLISHED, Point

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


def path_of(site: str) -> Path:
    """Where the site's own constants are kept."""
    if not _SITE_NAME.match(site):
        raise UserError(f"site {site!r}: a name of letters, digits, '.', '_' and '-' is needed to keep its calibration")
    root = os.environ.get("DSV4KIT_CONFIG")
    try:
        base = Path(root) if root else Path.home() / ".config" / "dsv4kit"
    except RuntimeError:  # a container with a user id of its own, which no passwd knows
        raise UserError("HOME is not set, and this user has no home; DSV4KIT_CONFIG=<directory> does without") from None
    return base / "calibration" / f"{site}.yaml"


def coefficients_for(site: str | None) -> SiteConstants:
    """The built-in constants with the site's own in place of theirs, where there are any."""
    path = path_of(site) if site and _SITE_NAME.match(site) else None
    if path is None or not path.is_file():
        return SiteConstants(built_in())
    runs = read_runs(path)
    fitted = _combined(runs)
    names = ", ".join(run["run"] for run in runs)
    origin = f"built-in, {len(fitted)} of them fitted at {site} (runs {names})"
    points = tuple(Point(**run["point"]) for run in runs)
    return SiteConstants(built_in().with_values(fitted, origin), (*points, *PUBLISHED))


def _combined(runs: list[dict[str, Any]]) -> dict[str, Coefficient]:
    found: dict[str, tuple[float, str]] = {}
    for run in runs:
        for name, value in run["values"].items():
            is_memory = name.partition(".")[0] in _MEMORY
            if is_memory and name in found and found[name][0] >= value:
                continue
            found[name] = float(value), f"run {run['run']}"
    known = built_in().by_name
    return {
        name: Coefficient(value, known[name].unit if name in known else "", "fitted", source)
        for name, (value, source) in found.items()
    }


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The runs a calibration file was made from: name, point, and the values they gave."""
    try:
        runs = yaml_text.parse(path.read_text(encoding="utf-8"))["runs"]
        for run in runs:
            Point(**run["point"])
            values = {str(name): float(value) for name, value in run["values"].items()}
            run["values"] = {n: value for n, value in values.items() if n.partition(".")[0] not in _RETIRED}
            if not all(map(math.isfinite, run["values"].values())):
                raise ValueError
            run["run"] = str(run["run"])
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (TypeError, KeyError, ValueError, AttributeError):
        raise UserError(
            f"{path}: not a calibration file; `dsv4kit plan --calibrate RUN_DIR` writes a new one"
        ) from None
    known = {name.partition(".")[0] for name in built_in().by_name}
    for run in runs:
        for name in run["values"]:
            if (stem := name.partition(".")[0]) not in known:
                raise UserError(f"{path}: run {run['run']}: {name}: no such constant{nearest(stem, known)}")
    return list(runs)
