"""The run directory: the whole truth about a run, on the shared file system. Every path in it is spelt here.

    <run>/run.yaml                    what the run was submitted with (read by the control plane: it is YAML)
    <run>/node.json                   what the nodes are told                                        (node_spec)
    <run>/chain.json                  the segments and their job ids
    <run>/origin.json                 the run and step it began with, where it branches from another one
    <run>/excluded_nodes.jsonl        nodes the run avoids, and why                                  (exclusions)
    <run>/kit/                        the code that runs on the nodes
    <run>/own/                        the user's reward function, as it was at the submission
    <run>/kernels/<key>/              compiled kernels for the next segments                         (kernels)
    <run>/checkpoints/ quarantine/    verl's checkpoints, and those that were set aside              (checkpoint/)
    <run>/report.html                 what the run was, written by `report`
    <run>/segments/0001/              segment.sbatch, conclude.sh, submitit/, slurm.log, job_id; where segments submit
                                      the next ones: submit_next.sh, submitting, not_submitted; what steers it: STOP,
                                      request.json, cancelled.json, resumed.json; what the batch script reads: verdict,
                                      excluded_nodes (outcome)
    <run>/segments/0001/attempt-0/    plan.json (course), phases.jsonl (phases), driver.log (driver_log),
                                      metrics.jsonl (metrics), outcome.json (outcome), nodes/ (node_files),
                                      kernels/ (kernels)

templates/segment.sbatch.j2 spells what the batch script touches once more: no Python runs there.

Standard library only; frozen into every run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsv4kit.run.errors import DamagedFileError
from dsv4kit.run.files import read_json, read_object, write_json

_JOB_NAME = re.compile(r"(.+)-[0-9a-f]{8}\Z")
_SEGMENT = re.compile(r"[0-9]{4,}\Z")
_ATTEMPT = re.compile(r"attempt-([0-9]+)\Z")


@dataclass(frozen=True)
class ChainLink:
    """One segment of the chain; `job_id` is empty while none is known to have been submitted for it.

    `spare`: one more than the run's steps take, for a segment that fails.
    """

    segment: int
    job_id: str = ""
    spare: bool = False


@dataclass(frozen=True)
class AttemptDir:
    """Paths of one attempt. The environment variable DSV4KIT_ATTEMPT_DIR names it to the trainer's processes."""

    path: Path

    @property
    def segment(self) -> SegmentDir:
        """The segment it is one of."""
        return SegmentDir(self.path.parent)

    @property
    def number(self) -> int:
        """Counted from 0 in each segment; raises ValueError for a directory that is not an attempt."""
        match = _ATTEMPT.match(self.path.name)
        if not match:
            raise ValueError(f"{self.path}: no directory of an attempt")
        return int(match[1])

    @property
    def course_file(self) -> Path:
        """The steps it is to make."""
        return self.path / "plan.json"

    @property
    def outcome_file(self) -> Path:
        """What it did; written last."""
        return self.path / "outcome.json"

    @property
    def phases_file(self) -> Path:
        """When which of its phases began."""
        return self.path / "phases.jsonl"

    @property
    def driver_log(self) -> Path:
        """What the driver prints."""
        return self.path / "driver.log"

    @property
    def metrics_file(self) -> Path:
        """What verl's file logger writes."""
        return self.path / "metrics.jsonl"

    @property
    def stopped_file(self) -> Path:
        """Written by the plugin where it made a step the segment's last: `{"step": ..., "reason": ...}`."""
        return self.path / "stopped.json"

    @property
    def ready_file(self) -> Path:
        """Node 0 says: every node takes part."""
        return self.path / "ready.json"

    @property
    def over_file(self) -> Path:
        """Node 0 says: the attempt is over."""
        return self.path / "over.json"

    @property
    def torchrun_file(self) -> Path:
        """Node 0 says where torchrun meets and which step is the last: `{"address": ..., "target": ...}`."""
        return self.path / "torchrun.json"

    @property
    def ray_head_file(self) -> Path:
        """Node 0 says where Ray's head is: `{"address": "host:port"}`."""
        return self.path / "ray_head.json"

    @property
    def ray_nodes_file(self) -> Path:
        """Addresses of the nodes that have joined Ray."""
        return self.path / "ray_nodes.json"

    @property
    def explain_file(self) -> Path:
        """Asks every node what its processes are doing: `{"asked": ...}` (stacks)."""
        return self.path / "explain.json"

    @property
    def bandwidth_file(self) -> Path:
        """What the doctor's visit measured."""
        return self.path / "bandwidth.json"

    @property
    def doctor_file(self) -> Path:
        """What the doctor's visit found beyond single nodes: `{"problem": ...}`."""
        return self.path / "doctor.json"

    @property
    def nodes(self) -> Path:
        """Directory of the files that each node writes about itself, see `node_files`."""
        return self.path / "nodes"

    def ray_logs(self, host: str) -> Path:
        """Where a node keeps Ray's logs."""
        return self.path / "ray-logs" / host


@dataclass(frozen=True)
class SegmentDir:
    """Paths of one segment."""

    path: Path

    @property
    def number(self) -> int:
        """Counted from 1."""
        return int(self.path.name)

    @property
    def script(self) -> Path:
        """The batch script."""
        return self.path / "segment.sbatch"

    @property
    def conclude_script(self) -> Path:
        """What the batch script runs when its srun is over; templates/conclude.sh as it was at the submission."""
        return self.path / "conclude.sh"

    @property
    def submit_next_script(self) -> Path:
        """What submits the segments behind it, where not all are in the queue at once (templates/submit_next.sh)."""
        return self.path / "submit_next.sh"

    @property
    def submitting_file(self) -> Path:
        """Somebody is about to submit it: `submit` or `resume`, or the batch script of an earlier segment."""
        return self.path / "submitting"

    @property
    def not_submitted_file(self) -> Path:
        """Why an earlier segment could not submit it."""
        return self.path / "not_submitted"

    @property
    def resumed_file(self) -> Path:
        """A resume begins with this segment: attempts without progress are counted from here on."""
        return self.path / "resumed.json"

    @property
    def job_environment(self) -> Path:
        """The environment its job starts with, in the form of sbatch's --export-file."""
        return self.path / "job.env"

    @property
    def container_start_file(self) -> Path:
        """When the batch script's srun began to start the containers, in seconds since the epoch."""
        return self.path / "container_start"

    def container_began(self) -> float | None:
        """What it says; None where there are no containers, or none was started yet."""
        try:
            return round(float(self.container_start_file.read_text(encoding="utf-8")), 3)
        except (OSError, ValueError):
            return None

    @property
    def submitit(self) -> Path:
        """submitit's own files."""
        return self.path / "submitit"

    @property
    def job_id_file(self) -> Path:
        """The id of its job: written by its batch script, and before by who submitted it if others might do so too."""
        return self.path / "job_id"

    @property
    def job_id(self) -> str:
        """What that file says; empty where there is none."""
        try:
            found = re.match(r"[0-9]+\n", self.job_id_file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return ""
        return found[0].strip() if found else ""

    @property
    def payload(self) -> Path:
        """What submitit runs on the nodes. The batch script copies it to the name that has its job's id in it."""
        return self.submitit / "payload.pkl"

    @property
    def log(self) -> Path:
        """What the batch script and the agents print."""
        return self.path / "slurm.log"

    @property
    def stop_file(self) -> Path:
        """Asks the trainer to save and end; the batch script or a person makes it."""
        return self.path / "STOP"

    @property
    def request_file(self) -> Path:
        """What the user asked of it: to go back to an older step, or to start over, see `course.SegmentRequest`."""
        return self.path / "request.json"

    @property
    def changes_file(self) -> Path:
        """Settings that a resume changed from this segment on: setting -> what it was, what it is."""
        return self.path / "changes.json"

    @property
    def cancel_file(self) -> Path:
        """From which attempt on its user has cancelled it."""
        return self.path / "cancelled.json"

    @property
    def next_file(self) -> Path:
        """What the batch script does next; the file is called as it always was."""
        return self.path / "verdict"

    @property
    def excluded_file(self) -> Path:
        """Nodes that the batch script keeps the next segments away from, with commas."""
        return self.path / "excluded_nodes"

    def attempt(self, number: int) -> AttemptDir:
        """One attempt, counted from 0."""
        return AttemptDir(self.path / f"attempt-{number}")

    def attempts(self) -> list[AttemptDir]:
        """The attempts that were begun, oldest first."""
        found = [AttemptDir(path) for path in _directories(self.path, _ATTEMPT)]
        return sorted(found, key=lambda attempt: attempt.number)


@dataclass(frozen=True)
class RunDir:
    """Paths of one run, and its chain."""

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
        recorded = read_object(self._chain_file).get("job_name")
        if isinstance(recorded, str) and _JOB_NAME.match(recorded):
            return recorded
        return f"{self.name}-{self.digest}"

    @property
    def digest(self) -> str:
        """Eight digits that tell the run from others of the same name elsewhere."""
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:8]

    def kernels(self, key: str) -> Path:
        """What was compiled for that key, see `kernels`."""
        return self.path / "kernels" / key

    @property
    def record_file(self) -> Path:
        """`run.yaml`: what the run was submitted with."""
        return self.path / "run.yaml"

    @property
    def node_spec_file(self) -> Path:
        """What the nodes are told."""
        return self.path / "node.json"

    @property
    def exclusions_file(self) -> Path:
        """Nodes the run avoids, and why (exclusions)."""
        return self.path / "excluded_nodes.jsonl"

    @property
    def origin_file(self) -> Path:
        """The run and step whose checkpoint this one began with, if any: `{"run", "directory", "step"}`."""
        return self.path / "origin.json"

    @property
    def kit(self) -> Path:
        """Frozen node runtime."""
        return self.path / "kit"

    @property
    def own(self) -> Path:
        """Frozen code of the user's: the reward function's file."""
        return self.path / "own"

    @property
    def checkpoints(self) -> Path:
        """Where verl saves, unless the user names another place."""
        return self.path / "checkpoints"

    @property
    def report_file(self) -> Path:
        """What the run was, on one page."""
        return self.path / "report.html"

    @property
    def tracking(self) -> Path:
        """What trackers write: wandb's, TensorBoard's and MLflow's files."""
        return self.path / "tracking"

    @property
    def quarantine(self) -> Path:
        """Checkpoints that were set aside."""
        return self.path / "quarantine"

    def segment(self, number: int) -> SegmentDir:
        """Directory of one segment, counted from 1."""
        return SegmentDir(self._segments / f"{number:04d}")

    def segments(self) -> list[SegmentDir]:
        """The segments that have a directory, in order."""
        found = [SegmentDir(path) for path in _directories(self._segments, _SEGMENT)]
        return sorted(found, key=lambda segment: segment.number)

    def attempts_before(self, attempt: AttemptDir) -> list[AttemptDir]:
        """Those made before that one, in order; none where it is not one of this run's."""
        made = self.attempts()
        return made[: made.index(attempt)] if attempt in made else []

    def attempts(self) -> list[AttemptDir]:
        """All attempts of all segments, in the order in which they were made."""
        return [attempt for segment in self.segments() for attempt in segment.attempts()]

    def chain(self) -> list[ChainLink]:
        """The segments of the run, in order, also those without a job yet. Raises DamagedFileError."""
        path = self._chain_file
        if not path.exists() and not self._segments.exists():
            return []
        content: Any = read_json(path)
        try:
            links = [
                ChainLink(int(link["segment"]), str(link["job_id"]), link.get("spare") is True)
                for link in content["segments"]
            ]
        except (TypeError, KeyError, ValueError, AttributeError):
            raise DamagedFileError.of(path, "the job ids of the run's segments") from None
        return [link if link.job_id else replace(link, job_id=self.segment(link.segment).job_id) for link in links]

    def save_chain(self, links: Sequence[ChainLink], job_name: str | None = None) -> None:
        """Writes `chain.json`; `job_name` where the run still lies under another path than its own."""
        segments = [vars(link) for link in links]
        write_json(self._chain_file, {"job_name": job_name or self.job_name, "segments": segments})

    @property
    def _chain_file(self) -> Path:
        return self.path / "chain.json"

    @property
    def _segments(self) -> Path:
        return self.path / "segments"


def runs_below(root: Path) -> list[RunDir]:
    """Every run that was submitted below `root`, in no order; one that is still being written begins with a dot."""
    found = root.glob(f"*/{RunDir(root).record_file.name}")
    return [RunDir(path.parent) for path in found if not path.parent.name.startswith(".")]


def run_of_job(job_name: str) -> str | None:
    """The run that a Slurm job belongs to, by its name; None for another program's job."""
    match = _JOB_NAME.match(job_name)
    return match[1] if match else None


def _directories(parent: Path, name: re.Pattern[str]) -> Iterable[Path]:
    try:
        with os.scandir(parent) as entries:
            return [parent / entry.name for entry in entries if name.match(entry.name) and entry.is_dir()]
    except OSError:
        return []
