"""Segments into the queue, each waiting for the one before to end, however it ends (`singleton,afterany`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from submitit.core.utils import FailedJobError, FailedSubmissionError

from dsv4kit.errors import UserError
from dsv4kit.launch.executor import SegmentExecutor
from dsv4kit.launch.render import conclude_text
from dsv4kit.launch.slurm import Slurm, error_lines
from dsv4kit.run.course import SegmentRequest
from dsv4kit.run.directory import ChainLink, RunDir
from dsv4kit.run.files import write_json, write_text


class JobsLeftError(UserError):
    """Jobs of a submission that failed are still in the queue, because cancelling them failed too."""


def submit_segments(
    run: RunDir,
    segments: Iterable[int],
    executor: Callable[[int, str | None], SegmentExecutor],
    progress: Callable[[str], None],
    slurm: Slurm,
    request: SegmentRequest | None = None,
) -> list[ChainLink]:
    """Submits the segments in order and records them in `chain.json` as they get their job ids.

    `executor` makes the executor of a segment that waits for a job id. `request` is what the first of them is asked for
    (see run/course.py). Whatever interrupts it (sbatch refuses one, a key is pressed), the jobs submitted so far are
    cancelled and the chain is as before; JobsLeftError where that is impossible.
    """
    from dsv4kit.node.agent import run_segment  # all of the agent: nothing a dry run needs

    before = run.chain()
    links: list[ChainLink] = []
    after: str | None = None
    segment = 0
    try:
        for segment in segments:
            prepared = executor(segment, after)
            write_text(run.segment(segment).script, prepared.script_text())
            write_text(run.segment(segment).conclude_script, conclude_text())
            if not links and before:
                write_json(run.segment(segment).resumed_file, {"time": round(time.time(), 1)})
            if request and not links:
                request.save(run.segment(segment))
            job = prepared.submit(run_segment, str(run.path), segment)
            slurm.confirm(str(job.job_id), run.job_name, after)
            after = str(job.job_id)
            links.append(ChainLink(segment, after))
            run.save_chain([*before, *links])
            with contextlib.suppress(BrokenPipeError):  # the reader of the output is gone; the submission goes on
                progress(f"segment {segment}: job {after}")
    except BaseException as error:
        _take_back(run, before, slurm)
        if isinstance(error, FailedJobError | FailedSubmissionError):
            raise UserError(f"sbatch refused segment {segment}: {error_lines(str(error))}") from None
        raise
    return links


def _take_back(run: RunDir, before: list[ChainLink], slurm: Slurm) -> None:
    """Cancels by name: the job whose id was not read yet is among them, and before these the run had no live one."""
    try:
        slurm.cancel_named(run.job_name)
    except UserError as error:
        raise JobsLeftError(f"RUN={run.name}: jobs named {run.job_name} may be left in the queue: {error}") from None
    run.save_chain(before)
