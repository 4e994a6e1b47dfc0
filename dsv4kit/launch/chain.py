"""Segments into the queue, each waiting for the one before to end, however it ends (`afterany`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from submitit.core.utils import FailedJobError, FailedSubmissionError

from dsv4kit.errors import UserError
from dsv4kit.launch.executor import SegmentExecutor
from dsv4kit.launch.run_dir import ChainLink, RunDir
from dsv4kit.launch.slurm import Slurm
from dsv4kit.node.agent import run_segment
from dsv4kit.node.files import write_json, write_text


def submit_segments(
    run: RunDir,
    segments: Iterable[int],
    executor: Callable[[int, str | None], SegmentExecutor],
    progress: Callable[[str], None],
    slurm: Slurm | None = None,
    after: str | None = None,
    request: dict[str, object] | None = None,
) -> list[ChainLink]:
    """Submits the segments in order and records them in `chain.json` as they get their job ids.

    `executor` makes the executor of a segment that waits for a job id. `request` is what the first of them is asked for
    (see node/resume.py). When sbatch refuses one, those already submitted are cancelled and the chain is as before.
    """
    before = run.chain()
    links: list[ChainLink] = []
    try:
        for segment in segments:
            prepared = executor(segment, after)
            write_text(run.segment(segment) / "segment.sbatch", prepared.script_text())
            if request and not links:
                write_json(run.segment(segment) / "request.json", request)
            job = prepared.submit(run_segment, str(run.path), segment)
            after = str(job.job_id)
            links.append(ChainLink(segment, after))
            run.save_chain([*before, *links])
            progress(f"segment {segment}: job {after}")
    except (FailedJobError, FailedSubmissionError) as error:
        (slurm or Slurm()).cancel([link.job_id for link in links])
        run.save_chain(before)
        raise UserError(f"sbatch refused segment {len(before) + len(links) + 1}: {_last_line(error)}") from None
    return links


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "error:" in line]
    return lines[-1] if lines else str(error).strip().splitlines()[-1]
