"""Where an attempt begins and ends, decided by node 0 from what is on disk."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.checkpoint.inspection import CheckpointError
from dsv4kit.checkpoint.repair import prepare_resume
from dsv4kit.checkpoint.tracker import read_tracker
from dsv4kit.node.attempt import Attempt
from dsv4kit.run import ends, outcome
from dsv4kit.run.files import read_json
from dsv4kit.run.node_spec import NodeSpec

# In the directory of a segment: what its user asked of it, to go back to an older step or to start over.
REQUEST = "request.json"


@dataclass(frozen=True)
class Plan:
    """`plan.json` of an attempt: the step it resumes from, the one it ends with; `refusal` says why it must not run."""

    start: int
    target: int
    actions: list[str]
    refusal: list[str]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self)


def plan(spec: NodeSpec, attempt: Attempt) -> Plan:
    """Looks at the checkpoints, repairs what can be repaired, and fixes the steps of this attempt."""
    close_lost_attempts(spec, attempt)
    request = read_json(attempt.segment_dir / REQUEST) or {}
    asked = request if attempt.number == 0 else {}  # a restart of the segment goes on from where the first attempt got
    high_water = max((past.reached for past in outcome.history(attempt.run_dir)), default=0)
    try:
        found = prepare_resume(
            Path(spec.checkpoint_dir),
            Path(spec.quarantine_dir),
            high_water_step=high_water,
            expected_contents=spec.checkpoint_contents,
            data_ranks=spec.data_ranks,
            from_step=asked.get("from_step"),
            allow_restart=bool(asked.get("allow_restart")),
            world_size=spec.nodes * spec.ray.gpus,
        )
    except CheckpointError as error:
        return Plan(0, 0, [], [str(error), *error.evidence])
    target = min(found.start_step + spec.segment_steps, spec.total_steps)
    return Plan(found.start_step, target, list(found.actions), [])


def close_lost_attempts(spec: NodeSpec, attempt: Attempt) -> None:
    """Gives every earlier attempt that left no outcome (its node died) one that says so."""
    for path in sorted(attempt.run_dir.glob("segments/[0-9]*/attempt-*")):
        segment, number = int(path.parent.name), int(path.name.removeprefix("attempt-"))
        if (segment, number) >= (attempt.segment, attempt.number) or (path / "outcome.json").exists():
            continue
        planned = read_json(path / "plan.json") or {"start": 0, "target": 0}
        lost = outcome.Outcome(
            segment=segment,
            attempt=number,
            job_id="",
            start=planned["start"],
            target=planned["target"],
            reached=max(read_tracker(Path(spec.checkpoint_dir)) or 0, planned["start"]),
            end=ends.LOST,
            verdict=outcome.CONTINUE,
            reason="the attempt left no outcome: its first node or the whole job was lost",
        )
        outcome.save(lost, path.parent)
