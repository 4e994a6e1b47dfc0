"""submitit's Slurm executor, with our rendered template as the batch script."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import submitit
from submitit.core.utils import CommandFunction, DelayedSubmission, FailedSubmissionError

from dsv4kit.launch.render import SegmentScript, conclude_text, submit_next_text
from dsv4kit.launch.slurm import TOKEN, Slurm, submitted_job
from dsv4kit.run.files import replacement, write_text


class SegmentExecutor(submitit.SlurmExecutor):
    """Submits one segment. submitit brings the payload (its pickle, its command, its job files); the script is ours.

    All that the segment needs is written first (`prepare`), and its job submitted later, by this process or another.
    sbatch runs in the caller's environment, without what would steer it; the job starts with one of its own.
    """

    def __init__(
        self, folder: Path, script: SegmentScript, python: str, slurm: Slurm, after: str | None = None
    ) -> None:
        """`python` runs on the nodes; `after` is the job id to wait for."""
        super().__init__(folder, python=shlex.quote(python))
        self._script = script
        self._slurm = slurm
        self._after = after
        self._environment = script.run.segment(script.segment).job_environment
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

    def prepare(self, function: Callable[..., object], *arguments: object) -> None:
        """Writes the segment's script, what that runs at its end, its environment and its payload: `function`."""
        segment = self._script.run.segment(self._script.segment)
        write_text(segment.script, self.script_text())
        write_text(segment.conclude_script, conclude_text())
        if self._script.last is not None:
            write_text(segment.submit_next_script, submit_next_text())
        self._write_environment()
        segment.submitit.mkdir(exist_ok=True)
        with replacement(segment.payload) as temporary:
            DelayedSubmission(function, *arguments).dump(temporary)

    def submit_prepared(self) -> str:
        """Submits what `prepare` wrote; its job id. Raises what submitit raises where sbatch refuses it."""
        script = str(self._script.run.segment(self._script.segment).script)
        # With --export-file sbatch finds its own token in that file only, and a run directory keeps no secrets.
        if not (token := self._slurm.token):
            return self._job_id_of(self.sbatch_command(script))
        with self._environment_in(token):
            return self._job_id_of(self.sbatch_command(script))

    def _job_id_of(self, command: list[str]) -> str:
        return self._get_job_id_from_submission_command(CommandFunction(command, verbose=False)())

    def sbatch_command(self, script: str) -> list[str]:
        """The argv that submits it, for the caller's environment."""
        return self._slurm.command(*self._sbatch(script))

    def try_out(self, script: str) -> None:
        """Has sbatch look at the script exactly as it would be submitted, and submit nothing."""
        with self._environment_in(None):
            self._slurm.run(*self._sbatch("--test-only", script))

    def _sbatch(self, *last: str) -> list[str]:
        """`--export-file` replaces the whole environment of the job: the user's shell, and what secrets it holds, stay
        out. (`--export=NAMES` would have slurmd run the user's login shell on the node and hold the job if that fails:
        sbatch then sets SLURM_GET_USER_ENV.)

        `afterany` keeps the order of the chain. It is fulfilled at once when the job before is cancelled in the queue,
        so `singleton` (one job at a time of this name, which only the run has) keeps two from training at once.
        """
        dependency = "--dependency=" + ",".join(["singleton", *([f"afterany:{self._after}"] if self._after else [])])
        return ["sbatch", "--parsable", f"--export-file={self._environment}", dependency, *last]

    @contextlib.contextmanager
    def _environment_in(self, token: str | None) -> Iterator[None]:
        """The job's environment, for this long, in a file that only this user can read."""
        kept = self._environment
        with tempfile.TemporaryDirectory() as directory:
            self._environment = Path(directory, kept.name)
            self._write_environment(**({TOKEN: token} if token else {}))
            try:
                yield
            finally:
                self._environment = kept

    def _write_environment(self, **more: str) -> None:
        variables = {**self._slurm.job_environment, **more}
        write_text(self._environment, "".join(f"{key}={value}\0" for key, value in variables.items()))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script.render(command)

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        try:
            return submitted_job(string if isinstance(string, str) else string.decode(errors="replace"))
        except ValueError as error:
            raise FailedSubmissionError(f"sbatch: {error}") from None
