"""Where an attempt begins and ends, decided by node 0 from what is on disk."""

from __future__ import annotations

from pathlib import Path

from dsv4kit.checkpoint.inspection import CheckpointError
from dsv4kit.checkpoint.repair import prepare_resume
from dsv4kit.checkpoint.tracker import read_tracker
from dsv4kit.node.attempt import Attempt
from dsv4kit.run import course, ends, outcome
from dsv4kit.run.course import Course, SegmentRequest
from dsv4kit.run.node_spec import NodeSpec


def set_course(spec: NodeSpec, attempt: Attempt) -> Course:
    """Looks at the checkpoints, repairs what can be repaired, and fixes the steps of this attempt."""
    close_lost_attempts(spec, attempt)
    # What was asked for is done once: an attempt after the one that did it goes on from where that one got.
    earlier = [was for before in range(attempt.number) if (was := course.load(attempt.segment_dir.attempt(before)))]
    asked = SegmentRequest() if earlier else course.request_of(attempt.segment_dir)
    high_water = max((past.reached for past in outcome.history(attempt.run)), default=0)
    try:
        found = prepare_resume(
            Path(spec.checkpoint_dir),
            Path(spec.quarantine_dir),
            high_water_step=high_water,
            expected_contents=spec.checkpoint_contents,
            data_ranks=spec.data_ranks,
            from_step=asked.from_step,
            allow_restart=asked.allow_restart,
            world_size=spec.nodes * spec.ray.gpus,
        )
    except CheckpointError as error:
        return Course(0, 0, refusal=[str(error), *error.evidence])
    target = min(found.start_step + spec.segment_steps, spec.total_steps)
    if attempt.restarts and earlier:  # in the time that is left of the same job
        target = max(min(target, earlier[-1].target), min(found.start_step + 1, spec.total_steps))
    return Course(found.start_step, target, list(found.actions))


def close_lost_attempts(spec: NodeSpec, attempt: Attempt) -> None:
    """Gives every earlier attempt that left no outcome (its node died) one that says so."""
    for earlier in attempt.run.attempts():
        segment = earlier.segment
        if (segment.number, earlier.number) >= (attempt.segment, attempt.number) or earlier.outcome_file.exists():
            continue
        planned = course.load(earlier) or Course(0, 0)
        lost = outcome.Outcome(
            segment=segment.number,
            attempt=earlier.number,
            job_id="",
            start=planned.start,
            target=planned.target,
            reached=max(read_tracker(Path(spec.checkpoint_dir)) or 0, planned.start),
            end=ends.LOST,
            next=outcome.CONTINUE,
            reason="the attempt left no outcome: its first node or the whole job was lost",
        )
        outcome.save(lost, segment)
