"""Segments into the queue, each waiting for the one before to end, however it ends (`singleton,afterany`)."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Sequence

from submitit.core.utils import FailedJobError, FailedSubmissionError

from dsv4kit.errors import UserError
from dsv4kit.launch.executor import SegmentExecutor
from dsv4kit.launch.slurm import Slurm, error_lines
from dsv4kit.run.course import SegmentRequest
from dsv4kit.run.directory import ChainLink, RunDir
from dsv4kit.run.files import write_json, write_text

# As sbatch says that one has too many jobs: limits of an association, of a QOS, of the cluster.
_TOO_MANY = re.compile(r"Submit\w*Limit|MaxSubmit|job submit limit|temporarily unable to accept job|MaxJobCount", re.I)


class JobsLeftError(UserError):
    """Jobs of a submission that failed are still in the queue, because cancelling them failed too."""


def planned(first: int, count: int, spares: int) -> list[ChainLink]:
    """The segments of a chain that begins with the segment `first`: those its steps take, then the spare ones."""
    return [ChainLink(first + place, spare=place >= count) for place in range(count + spares)]


def submit_segments(
    run: RunDir,
    links: Sequence[ChainLink],
    executor: Callable[[int, str | None], SegmentExecutor],
    progress: Callable[[str], None],
    slurm: Slurm,
    request: SegmentRequest | None = None,
    limit: int | None = None,
) -> list[ChainLink]:
    """Writes all that the segments need, submits them in order, and records their job ids in `chain.json`.

    `executor` makes the executor of a segment that waits for a job id. `request` is what the first of them is asked for
    (see run/course.py). `limit`: most of them that go into the queue now; the batch scripts submit the others.
    The chain is recorded before anything of it is written or submitted, so that whoever reads the
    run knows how far a submission that was killed has come. Whatever else interrupts it (sbatch refuses one, a key is
    pressed), the jobs submitted so far are cancelled and the chain is as before; JobsLeftError where that cannot be.
    """
    from dsv4kit.node.agent import run_segment  # all of the agent: nothing a dry run needs

    before = run.chain()
    done: list[ChainLink] = []
    try:
        run.save_chain([*before, *links])
        for link in links:
            executor(link.segment, None).prepare(run_segment, str(run.path), link.segment)
        first = run.segment(links[0].segment)
        if before:
            write_json(first.resumed_file, {"time": round(time.time(), 1)})
        if request:
            request.save(first)
        now = links[:limit]
        if len(now) < len(links):
            for link in now:  # a segment that begins meanwhile is not to submit them, too
                write_text(run.segment(link.segment).submitting_file, "")
        for link in now:
            after = done[-1].job_id if done else None
            if len(now) < len(links):  # it lives: see submit_next.sh
                for waiting in now[len(done) :]:
                    run.segment(waiting.segment).submitting_file.touch()
            job_id = executor(link.segment, after).submit_prepared()
            slurm.confirm(job_id, run.job_name, after)
            done.append(ChainLink(link.segment, job_id, link.spare))
            if len(now) < len(links):
                write_text(run.segment(link.segment).job_id_file, f"{job_id}\n")
                run.segment(link.segment).submitting_file.unlink(missing_ok=True)
            run.save_chain([*before, *done, *links[len(done) :]])
            with contextlib.suppress(BrokenPipeError):  # the reader of the output is gone; the submission goes on
                progress(f"{name_of(link)}: job {job_id}")
        if rest := len(links) - len(now):
            with contextlib.suppress(BrokenPipeError):
                progress(
                    f"{rest} more are submitted by the segments before them: no more than {limit} are in the queue"
                )
    except BaseException as error:
        _take_back(run, before, links, slurm)
        if isinstance(error, FailedJobError | FailedSubmissionError):
            said = error_lines(str(error))
            raise UserError(
                f"sbatch refused segment {links[len(done)].segment}: {said}{_hint(said, len(done))}"
            ) from None
        raise
    return done


def _hint(said: str, accepted: int) -> str:
    """What helps where Slurm limits the jobs that one may have in the queue."""
    if not _TOO_MANY.search(said) or accepted < 2:
        return ""
    return f"; CHAIN={accepted} keeps no more than {accepted} of them in the queue; each segment submits the next one"


def name_of(link: ChainLink) -> str:
    """A segment as people are told of it."""
    return f"segment {link.segment}{' (spare)' if link.spare else ''}"


def _take_back(run: RunDir, before: Sequence[ChainLink], links: Sequence[ChainLink], slurm: Slurm) -> None:
    """Cancels by name: the job whose id was not read yet is among them, and before these the run had no live one."""
    try:
        slurm.cancel_named(run.job_name)
    except UserError as error:
        raise JobsLeftError(f"RUN={run.name}: jobs named {run.job_name} may be left in the queue: {error}") from None
    for link in links:  # what one of them was asked for must not be asked of a later one of its number
        shutil.rmtree(run.segment(link.segment).path, ignore_errors=True)
    run.save_chain(before)
