"""submitit's Slurm executor, with our rendered template as the batch script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import submitit

from dsv4kit.launch.render import SegmentScript


class SegmentExecutor(submitit.SlurmExecutor):
    """Submits one segment. submitit brings the payload (its pickle, its command, its job files); the script is ours."""

    def __init__(
        self, folder: Path, script: SegmentScript, python: str, env: Mapping[str, str], after: str | None = None
    ) -> None:
        """`python` runs on the nodes; `env` is the job's whole environment; `after` is the job id to wait for."""
        super().__init__(folder, python=shlex.quote(python))
        self._script = script
        self._env = dict(env)
        self._after = after
        self.update_parameters(nodes=script.settings.schedule.nodes, ntasks_per_node=1)

    @classmethod
    def name(cls) -> str:
        """The name under which submitit on the node finds its Slurm environment."""
        return "slurm"

    @classmethod
    def affinity(cls) -> int:
        """Always usable: a dry run needs no Slurm on this machine, and sbatch speaks for itself."""
        return 2

    def script_text(self) -> str:
        """The script, exactly as `submit` hands it to sbatch."""
        return self._make_submission_file_text(self._submitit_command_str, "")

    def sbatch_command(self, script: str) -> list[str]:
        """The argv that submits it. `env -i` keeps the user's shell, and what secrets it holds, out of the job.

        `afterany` keeps the order of the chain. It is fulfilled at once when the job before is cancelled in the queue,
        so `singleton` (one job at a time of this name, which only the run has) keeps two from training at once.
        """
        dependency = "--dependency=" + ",".join(["singleton", *([f"afterany:{self._after}"] if self._after else [])])
        return ["env", "-i", *(f"{key}={value}" for key, value in self._env.items()), "sbatch", dependency, script]

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script.render(command)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return self.sbatch_command(str(submission_file_path))
