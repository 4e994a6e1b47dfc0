"""A short job that has the nodes examine themselves in the run's own container: see node/doctor.py."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError

from dsv4kit.errors import UserError
from dsv4kit.launch import enroot_room
from dsv4kit.launch.enroot_room import HostLook
from dsv4kit.launch.executor import SegmentExecutor
from dsv4kit.launch.freeze import freeze
from dsv4kit.launch.render import SegmentScript
from dsv4kit.launch.slurm import ENDED, Slurm, error_lines
from dsv4kit.launch.submission import Submission
from dsv4kit.node.doctor import visit
from dsv4kit.run import node_files, node_spec
from dsv4kit.run.directory import AttemptDir, RunDir
from dsv4kit.run.files import read_object
from dsv4kit.run.node_files import NodeReport

_POLL_S = 0.5
_HOSTS = "hosts"
# Starting a large container takes minutes, the measurement a few more at most.
_TIME = "00:20:00"


@dataclass(frozen=True)
class Visit:
    """A job on its way; its directory holds what the nodes write."""

    run: RunDir
    job_id: str
    slurm: Slurm
    nodes: int

    @property
    def _attempt(self) -> AttemptDir:
        return self.run.segment(1).attempt(0)

    def wait(self, progress: Callable[[str], None]) -> str:
        """Until the job is over; returns its last state. Ended early by the user, the job is cancelled."""
        shown = ""
        try:
            while True:
                job = self.slurm.states([self.job_id]).get(self.job_id)
                if job is None or job.state in ENDED:
                    return job.state if job else "unknown"
                if (line := f"job {self.job_id}: {job.state} {job.reason}") != shown:
                    shown = line
                    progress(line)
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            self.slurm.cancel([self.job_id])
            raise

    def reports(self) -> list[NodeReport]:
        """What the nodes said, by name."""
        return node_files.reports(self._attempt)

    def hosts(self) -> list[HostLook]:
        """What the nodes have for enroot, by name; empty where the site has no pyxis."""
        directory = self.run.segment(1).path / _HOSTS
        return [enroot_room.parse(file.name, file.read_text(errors="replace")) for file in sorted(directory.glob("*"))]

    def bandwidth(self) -> dict[str, Any]:
        """What was measured; empty where nothing was."""
        return read_object(self._attempt.bandwidth_file)

    def problem(self) -> str:
        """What is wrong beyond single nodes; empty where nothing is."""
        heard = len(self.reports())
        if heard < self.nodes:
            return f"{self.nodes - heard} of {self.nodes} nodes never reported; see {self.run.segment(1).log}"
        return str(read_object(self._attempt.doctor_file).get("problem", "node 0 gave no answer"))


def send(submission: Submission, root: Path) -> Visit:
    """Submits the job for as many nodes as the submission has; its directory is made below `root`."""
    run = RunDir(root / f"doctor-{time.strftime('%Y%m%d-%H%M%S')}")
    settings = submission.resolved.settings
    schedule = settings.schedule.model_copy(update={"time": _TIME, "steps": 1, "segment_steps": 1})
    settings = settings.model_copy(update={"schedule": schedule})
    spec = dataclasses.replace(
        dataclasses.replace(submission, run=run).node_spec(),
        module="dsv4kit.node.bandwidth",
        launcher="torchrun",
        overrides=[],
        rollout_seed=None,
    )
    freeze(run.kit)
    node_spec.write(run, spec.as_dict())
    script = SegmentScript(settings, submission.site, run, 1, look=str(run.segment(1).path / _HOSTS))
    executor = SegmentExecutor(run.segment(1).submitit, script, submission.python, submission.slurm)
    try:
        executor.prepare(visit, str(run.path))
        job_id = executor.submit_prepared()
        submission.slurm.confirm(job_id, run.job_name, None)
    except (FailedJobError, FailedSubmissionError) as error:
        raise UserError(f"sbatch refused the doctor's job: {error_lines(str(error))}") from None
    return Visit(run, job_id, submission.slurm, schedule.nodes)
