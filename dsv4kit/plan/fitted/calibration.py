"""The constants of one site, fitted to runs made there: a run is added (`calibrate`) or taken out again (`forget`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dsv4kit.errors import UserError, nearest
from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted.coefficients import Coefficients, built_in
from dsv4kit.plan.counted.inputs import NodeKind, Question
from dsv4kit.plan.fitted.calibrated import point_of
from dsv4kit.plan.fitted.fitting import Fit, fit, fit_without_plan
from dsv4kit.plan.fitted.measured import Observation, Shape, observe
from dsv4kit.plan.fitted.site_constants import (
    Run,
    all_files,
    coefficients_for,
    combined,
    path_of,
    read_runs,
    write_runs,
)

_GPU_MEMORY_NUMA_NODES = range(64)


class Calibration(NamedTuple):
    """What came of one run: the fit, the constants in use before and after, and the file (to be) written."""

    run: str
    site: str
    seen: Observation
    fit: Fit
    before: Coefficients
    after: Coefficients
    path: Path
    kept: bool


def calibrate(
    run_dir: Path, question: Question | None, shape: Shape, hardware: str, site: str, dry_run: bool = False
) -> Calibration:
    """Fits the site's constants to the run and keeps them, unless `dry_run`.

    `question` is None where the run's model has no geometry: what is left to be fitted then is how long things take.
    """
    path = path_of(site)
    seen = observe(run_dir, shape)
    if not seen.attempts:
        told = f" ({'; '.join(f'{name}: {why}' for name, why in seen.left_out)})" if seen.left_out else ""
        raise UserError(f"{run_dir}: no attempt of it trained a step, so that there is nothing to fit to{told}")
    found = fit(evaluate(question, built_in()), seen) if question else fit_without_plan(seen, hardware)
    if not found.values:
        raise UserError(f"{run_dir}: " + "; ".join(f"{name}: {why}" for name, why in found.not_fitted.items()))
    before = coefficients_for(site).coefficients
    others = [run for run in (read_runs(path) if path.is_file() else []) if run.name != seen.run]
    runs = [*others, Run(seen.run, point_of(question) if question else None, found.values)]
    after = built_in().with_values(combined(runs), "")
    if not dry_run:
        write_runs(path, site, runs)
    return Calibration(seen.run, site, seen, found, before, after, path, not dry_run)


def shape_of(question: Question) -> Shape:
    """What has to be known to read a run's files."""
    return Shape(
        nodes=question.parallel.nodes,
        has_rollout=question.rollout is not None,
        save_freq=question.schedule.save_freq,
        gpu_memory_numa=gpu_memory_numa(question.hardware),
    )


def gpu_memory_numa(hardware: NodeKind) -> tuple[int, ...]:
    """NUMA nodes that are GPU memory: on Grace all that are not the CPUs'."""
    if hardware.cpu_architecture != "aarch64":
        return ()
    return tuple(index for index in _GPU_MEMORY_NUMA_NODES if index not in hardware.cpu_numa_nodes)


def forget(run: str, site: str | None = None) -> tuple[Path, ...]:
    """Takes a run's values out of the site's constants, or of every site's; the files that were changed."""
    name = Path(run).name
    files = [path_of(site)] if site else all_files()
    runs = {path: read_runs(path) for path in files if path.is_file()}
    changed = tuple(path for path, known in runs.items() if any(one.name == name for one in known))
    if not changed:
        known = sorted({one.name for of_site in runs.values() for one in of_site})
        there = f"; there are {', '.join(known)}" if known else ""
        raise UserError(f"no constants were fitted to a run {name!r}{nearest(name, known)}{there}")
    for path in changed:
        write_runs(path, path.stem, [one for one in runs[path] if one.name != name])
    return changed
