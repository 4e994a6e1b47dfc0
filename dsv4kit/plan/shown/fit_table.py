"""What a calibration found: constants before and after, how well the plan meets the run, and what was not fitted."""

from __future__ import annotations

from typing import Any

from dsv4kit.plan.counted.coefficients import Coefficients
from dsv4kit.plan.fitted.calibration import Calibration
from dsv4kit.plan.shown.table import WIDTH, table


def render(x: Calibration) -> str:
    """For people."""
    import textwrap

    rows = [
        (name, _before(x.before, name), f"{f.value:.4g}", f"{f.low:.4g} to {f.high:.4g}", _used(x, name), f.basis)
        for name, f in x.fit.values.items()
    ]
    blocks = [
        f"run {x.run}, {len(x.seen.attempts)} of its attempts: "
        + ", ".join(
            f"{attempt.name} ({attempt.trained} step{'' if attempt.trained == 1 else 's'})"
            for attempt in x.seen.attempts
        ),
        table(("constant", "before", "this run", "interval", "in use now", "fitted to"), rows),
    ]
    if x.fit.residuals:
        blocks.append(
            "What the run took, and what the planner says of it before and after:\n"
            + table(
                ("", "measured", "before", "after", "off by"),
                [
                    (
                        f"{r.what}, {r.unit}",
                        *(f"{value:.1f}" for value in (r.measured, r.before, r.after)),
                        f"{r.after / r.measured - 1:+.0%}" if r.measured else "-",
                    )
                    for r in x.fit.residuals
                ],
            )
        )
    untold = [f"{name}: {why}" for name, why in (*x.fit.not_fitted.items(), *x.seen.left_out)]
    if untold:
        blocks.append(
            "Not fitted, or left out:\n"
            + "\n".join(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ") for line in untold)
        )
    return "\n\n".join(blocks)


def as_json(x: Calibration) -> dict[str, Any]:
    """For programs."""
    return {
        "run": x.run,
        "site": x.site,
        "file": str(x.path),
        "kept": x.kept,
        "attempts": [attempt.name for attempt in x.seen.attempts],
        "left_out": dict(x.seen.left_out),
        "constants": {
            name: {
                "before": _value(x.before, name),
                "value": f.value,
                "low": f.low,
                "high": f.high,
                "in_use": _value(x.after, name),
                "basis": f.basis,
            }
            for name, f in x.fit.values.items()
        },
        "residuals": [r._asdict() for r in x.fit.residuals],
        "not_fitted": dict(x.fit.not_fitted),
    }


def _value(c: Coefficients, name: str) -> float | None:
    return c.by_name[name].value if name in c.by_name else None


def _before(c: Coefficients, name: str) -> str:
    value = _value(c, name)
    return "-" if value is None else f"{value:.4g}"


def _used(x: Calibration, name: str) -> str:
    return f"{x.after.by_name[name].value:.4g}"
