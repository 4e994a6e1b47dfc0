"""The run directory: the whole truth about a run, on the shared file system."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4kit.config.paths import ROOT
from dsv4kit.errors import UserError, nearest
from dsv4kit.run.files import read_json, write_json

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_JOB_NAME = re.compile(r"(.+)-[0-9a-f]{8}\Z")


@dataclass(frozen=True)
class ChainLink:
    """One segment in `chain.json`."""

    segment: int
    job_id: str


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def job_name(self) -> str:
        """Slurm job name of all its segments: no other run has it, because it carries a hash of the directory.

        `chain.json` has the one that the jobs have, whichever way the path was written or linked then.
        """
        chain: Any = read_json(self.path / "chain.json")
        recorded = chain.get("job_name") if isinstance(chain, dict) else None
        if isinstance(recorded, str) and _JOB_NAME.match(recorded):
            return recorded
        return f"{self.name}-{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:8]}"

    @property
    def kit(self) -> Path:
        """Frozen node runtime."""
        return self.path / "kit"

    def segment(self, number: int) -> Path:
        """Directory of one segment, counted from 1."""
        return self.path / "segments" / f"{number:04d}"

    def chain(self) -> list[ChainLink]:
        """The segments submitted so far, in order."""
        path = self.path / "chain.json"
        if not path.exists() and not (self.path / "segments").exists():
            return []
        content: Any = read_json(path)
        try:
            return [ChainLink(int(link["segment"]), str(link["job_id"])) for link in content["segments"]]
        except (TypeError, KeyError, ValueError):
            raise UserError(f"{path}: missing or damaged; it holds the job ids of the run's segments") from None

    def save_chain(self, links: Sequence[ChainLink]) -> None:
        """Writes `chain.json`."""
        write_json(self.path / "chain.json", {"job_name": self.job_name, "segments": [vars(link) for link in links]})

    def frozen(self) -> dict[str, Any]:
        """`run.yaml`: what the run was submitted with."""
        from dsv4kit import yaml_text

        path = self.path / "run.yaml"
        try:
            content = yaml_text.parse(path.read_text(encoding="utf-8"))
            return {**content, "site": {**content["site"]}, "settings": {**content["settings"]}}
        except (OSError, ValueError, TypeError, KeyError):
            raise UserError(f"{path}: missing or damaged; it holds what the run was submitted with") from None

    def node_spec(self) -> dict[str, Any]:
        """`node.json`, as the agents read it."""
        path = self.path / "node.json"
        content = read_json(path)
        if not isinstance(content, dict) or not {"checkpoint_dir", "total_steps"} <= content.keys():
            raise UserError(f"{path}: missing or damaged; it holds what the run's nodes are told")
        return content


def name_of_job(job_name: str) -> str:
    """What a Slurm job is to people: the run that its name says it belongs to, or else the job."""
    run = _JOB_NAME.match(job_name)
    return f"run {run[1]}" if run else f"job {job_name}"


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
    runs = sorted((path for path in root.glob("*/run.yaml")), key=lambda path: path.stat().st_mtime)
    if name is None:
        if not runs:
            raise UserError(f"no run in {root} yet; `make submit HW=cpu` makes one")
        return _as_submitted(runs[-1].parent)
    known = [path.parent.name for path in runs]
    if checked_name(name) not in known:
        shown = ", ".join(known[-8:]) or "none"
        raise UserError(f"RUN={name!r}: no such run in {root}; newest: {shown}{nearest(name, known)}")
    return _as_submitted(root / name)


def _as_submitted(path: Path) -> RunDir:
    """The run under the path that it was submitted with (its nodes and its job name know it by that), if that is it."""
    spec: Any = read_json(path / "node.json")
    recorded = spec.get("run_dir") if isinstance(spec, dict) else None
    try:
        if isinstance(recorded, str) and os.path.samefile(recorded, path):
            return RunDir(Path(recorded))
    except (OSError, ValueError):
        pass
    return RunDir(path)
