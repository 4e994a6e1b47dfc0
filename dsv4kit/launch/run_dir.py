"""Runs by name, and what they were submitted with. The format of a run's directory is in `dsv4kit/run/`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4kit import hints
from dsv4kit.config.paths import ROOT
from dsv4kit.errors import UserError, nearest
from dsv4kit.run.directory import RunDir, run_of_job, runs_below
from dsv4kit.run.errors import DamagedFileError
from dsv4kit.run.files import read_object, write_text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


def read_record(run: RunDir) -> dict[str, Any]:
    """`run.yaml`: settings, site, versions, as they were when the run was submitted. Raises DamagedFileError.

    Read here and not in `dsv4kit/run/`, which has no YAML.
    """
    from dsv4kit import yaml_text

    try:
        content = yaml_text.parse(run.record_file.read_text(encoding="utf-8"))
        return {**content, "site": {**content["site"]}, "settings": {**content["settings"]}}
    except (OSError, ValueError, TypeError, KeyError):
        raise DamagedFileError.of(run.record_file, "what the run was submitted with") from None


def predicted(run: RunDir) -> dict[str, Any]:
    """What the planner said when the run was submitted (plan/shown/as_json.py); empty where it had nothing to say.

    Also of a run that an older kit submitted, which kept the verdict alone, and of one whose record is damaged.
    """
    try:
        plan = read_record(run).get("plan")
    except DamagedFileError:
        return {}
    found = plan.get("predicted") if isinstance(plan, dict) else None
    return found if isinstance(found, dict) else {}


def write_record(run: RunDir, content: Mapping[str, Any]) -> None:
    """Writes `run.yaml`."""
    import yaml

    write_text(run.record_file, yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True))


def name_of_job(job_name: str) -> str:
    """What a Slurm job is to people: the run that its name says it belongs to, or else the job."""
    run = run_of_job(job_name)
    return f"run {run}" if run else f"job {job_name}"


def runs_root() -> Path:
    """Where runs live: $DSV4KIT_RUNS, else `runs/` of the clone."""
    root = Path(os.environ.get("DSV4KIT_RUNS") or ROOT / "runs").absolute()
    if re.search(r"[\x00-\x1f]", str(root)):
        raise UserError(f"DSV4KIT_RUNS={str(root)!r}: a path with control characters cannot stand in a batch script")
    return root


def checked_name(name: str) -> str:
    """The name, if it can stand in paths, job names and scripts as it is."""
    if not _NAME.match(name):
        raise UserError(
            f"RUN={name!r}: a run's name has letters, digits, '.', '_' and '-' only, begins with a letter or digit,"
            " and is at most 63 long"
        )
    return name


def find_run(name: str | None) -> RunDir:
    """The run of that name; without one the newest."""
    root = runs_root()
    runs = sorted(runs_below(root), key=lambda run: run.record_file.stat().st_mtime)
    if name is None:
        if not runs:
            raise UserError(f"no run in {root} yet; `{hints.command('submit', HW='cpu')}` starts one")
        return _as_submitted(runs[-1])
    known = [run.name for run in runs]
    if checked_name(name) not in known:
        shown = ", ".join(known[-8:]) or "none"
        raise UserError(f"RUN={name!r}: no such run in {root}; newest: {shown}{nearest(name, known)}")
    return _as_submitted(RunDir(root / name))


def _as_submitted(run: RunDir) -> RunDir:
    """The run under the path that it was submitted with (its nodes and its job name know it by that), if that is it."""
    recorded = read_object(run.node_spec_file).get("run_dir")
    try:
        if isinstance(recorded, str) and os.path.samefile(recorded, run.path):
            return RunDir(Path(recorded))
    except (OSError, ValueError):
        pass
    return run
