"""Going on with a run whose chain has ended: more segments, with the frozen kit, settings and site it began with."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4kit import hints
from dsv4kit.checkpoint import inspection
from dsv4kit.config.frozen import frozen_settings
from dsv4kit.config.loading import Resolved
from dsv4kit.config.schema import Settings
from dsv4kit.config.site import Site
from dsv4kit.errors import UserError
from dsv4kit.feasibility.case import Case
from dsv4kit.feasibility.refusals import at_submission, refuse
from dsv4kit.image import fit
from dsv4kit.launch import changes, image_state, ownership
from dsv4kit.launch.chain import submit_segments
from dsv4kit.launch.changes import Asked
from dsv4kit.launch.freeze import half_renewed, renew, renewed
from dsv4kit.launch.run_dir import read_record, write_record
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.state import read_state
from dsv4kit.launch.submission import Submission, commit
from dsv4kit.run import ends, exclusions, node_spec, outcome
from dsv4kit.run.course import SegmentRequest
from dsv4kit.run.directory import ChainLink, RunDir
from dsv4kit.run.files import write_json
from dsv4kit.run.lease import DEAD_AFTER_S, Lease, LeaseHeldError, Owner


@dataclass(frozen=True)
class Resumption:
    """A resume, checked. `steps` is the new length of the run, `from_step` an older checkpoint to go back to.

    `forget_nodes`: nodes that the run has found bad may be used again.
    """

    run: RunDir
    slurm: Slurm
    steps: int | None = None
    from_step: int | None = None
    asked: Asked = field(default_factory=Asked)
    forget_nodes: bool = False

    def submit(self, progress: Callable[[str], None]) -> list[ChainLink]:
        """Submits as many segments as the remaining steps take. Of two resumes at once one is refused."""
        asker = Owner(f"process {os.getpid()}", 0, 0, socket.gethostname())
        lease = Lease(self.run.path, asker, name="resume.json")
        try:
            lease.take(told=lambda owner: _tell(progress, f"run {self.run.name}: {_watched(owner)}"))
        except LeaseHeldError as error:
            raise UserError(f"RUN={self.run.name}: another `resume` of it is under way: {_who(error.owner)}") from None
        try:
            if half_renewed(self.run.kit):
                _tell(progress, f"run {self.run.name}: a `resume` with KIT=new was killed; the kit is renewed now")
                return dataclasses.replace(self, asked=dataclasses.replace(self.asked, new_kit=True))._submit(progress)
            return self._submit(progress)
        finally:
            lease.give_back()

    def _submit(self, progress: Callable[[str], None]) -> list[ChainLink]:
        frozen = read_record(self.run)
        old_site = Site.model_validate(frozen["site"])
        site = self.asked.of_site(old_site)
        resolved, found = self.asked.of_settings(frozen, site)
        found |= {f"site.{key}": values for key, values in changes.diff(old_site, site).items()}
        settings = resolved.settings
        total = self.steps or settings.schedule.steps
        self._past_a_gate()
        start = self._start(settings, total)
        settings = settings.model_copy(update={"schedule": settings.schedule.model_copy(update={"steps": total})})
        image = fit.seen(site.container.image)
        state = image_state.kept(frozen.get("image"), site, named=bool(self.asked.image or self.asked.site))
        case = Case(settings, resolved.sources, site, image, first_step=start, submitted=True)
        refuse(case)
        for refusal in at_submission(case):
            raise UserError(refusal.line)
        old_spec = node_spec.read_as_dict(self.run)
        checkpoints = Path(old_spec["checkpoint_dir"])
        ownership.check(checkpoints, self.run, f"RUN={self.run.name}: checkpoint.directory")
        python = (site.python if site != old_site else None) or frozen["python"]
        before = Submission(
            Resolved(frozen_settings(frozen["settings"]), frozen.get("sources") or {}),
            old_site,
            self.run,
            self.slurm,
            frozen["python"],
        )
        if self.forget_nodes:
            exclusions.forget(self.run, time.time())
        avoid = self._avoided(settings.schedule.nodes, site)
        first = max((link.segment for link in self.run.chain()), default=0) + 1
        after = dataclasses.replace(
            before,
            resolved=Resolved(settings, resolved.sources),
            site=site,
            python=python,
            avoid=avoid,
            first_segment=first,
            first_step=start,
            started_in=state,
        )
        spec = old_spec
        if found.keys() - {"schedule.steps"} or self.asked.new_kit:
            was, made = before.node_spec().as_dict(), after.node_spec().as_dict()
            if not self.asked.new_kit and (lacking := changes.unknown_to_kit(old_spec, was, made)):
                raise UserError(
                    f"{', '.join(lacking)}: this run's own kit is older and knows no such setting;"
                    f" `{hints.command('resume', RUN=self.run.name, KIT='new')}` takes this one's"
                )
            spec = changes.told(old_spec, was, made)
            if self.asked.new_kit:  # it wants every key it knows, and no other
                spec = {key: spec.get(key, value) for key, value in made.items()}
        ownership.claim(checkpoints, self.run)
        _tell(
            progress,
            f"run {self.run.name}: goes on from step {start} of {total}{_over(first - 1)}",
            *(f"changed: {key}: {old} -> {new}" for key, (old, new) in found.items()),
        )

        with contextlib.ExitStack() as back:
            if self.asked.new_kit:
                renew(self.run.kit, back)
            back.callback(node_spec.write, self.run, old_spec)
            node_spec.write(self.run, spec | {"total_steps": total})
            renewed(self.run.kit)
            links = submit_segments(
                self.run,
                after.links,
                after.executor,
                progress,
                self.slurm,
                request=None if self.from_step is None else SegmentRequest(self.from_step, self.from_step == 0),
                limit=site.slurm.chain,
            )
            back.pop_all()
        if found or self.asked.new_kit:
            write_json(self.run.segment(first).changes_file, {**found, **_kits(frozen, self.asked.new_kit)})
        frozen |= {"settings": settings.model_dump(), "site": site.model_dump(), "python": python}
        frozen["image"] = state and state._asdict()
        frozen["sources"] = dict(resolved.sources)
        write_record(self.run, frozen)
        return links

    def _past_a_gate(self) -> None:
        """A run that a gate stopped goes on only where its user says how: past it, or from an older checkpoint."""
        past = outcome.history(self.run)
        asked = any(override.key.startswith("watch.gates.") for override in self.asked.overrides)
        if not past or past[-1].end != ends.GATE or asked or self.from_step is not None:
            return
        on = hints.command("resume", RUN=self.run.name, GATES="warn")
        raise UserError(
            f"RUN={self.run.name}: a gate stopped it: {' '.join(past[-1].evidence[:1])}. `{on}` goes on and only warns,"
            " GATES=act goes on with the gates as they are, FROM_STEP=N goes back to an older checkpoint"
        )

    def _avoided(self, nodes: int, site: Site) -> tuple[str, ...]:
        """The nodes the run has found bad, as far as the partition has enough others; those found last stay out."""
        bad = [one.node for one in exclusions.active(self.run, time.time())]
        spare = self.slurm.node_count(site.slurm.partition).there - nodes if bad else 0
        return tuple(bad[: max(0, spare)])

    def _start(self, settings: Settings, total: int) -> int:
        """The step the first new segment begins with; refuses a run that is still going or has nothing left to do."""
        state = read_state(self.run, self.slurm)
        if state.state == "unknown":
            raise UserError(f"RUN={self.run.name}: whether it still goes on is not known: {state.reason}")
        if live := state.other_jobs or (self.slurm.live(self.run.job_name) if state.over else {}):
            jobs = ", ".join(live)
            raise UserError(f"RUN={self.run.name}: has jobs in the queue ({jobs}); {_cancel(self.run)}")
        if not state.over:
            raise UserError(f"RUN={self.run.name}: is {state.state}; {_cancel(self.run)}")
        start = state.saved_step if self.from_step is None else self.from_step
        if self.from_step:
            directory = Path(node_spec.read_as_dict(self.run)["checkpoint_dir"])
            complete = [step.step for step in inspection.inspect(directory, settings.checkpoint.contents).complete]
            if self.from_step not in complete:
                shown = ", ".join(map(str, complete)) or "none"
                raise UserError(f"FROM_STEP={self.from_step}: no complete checkpoint of that step; there are: {shown}")
        if start >= total and self.steps is None:
            raise UserError(f"RUN={self.run.name}: finished, all {total} steps are saved; STEPS=N extends it")
        if start >= total:
            raise UserError(f"STEPS={total}: step {start} is saved already; a larger number goes on from there")
        return start


def _who(owner: str) -> str:
    """The process of another resume, as its lease names it."""
    return owner.removeprefix("job ").partition(" (")[0]


def _watched(owner: str) -> str:
    """Said at once, before a minute of silence."""
    return (
        f"another `resume` of it ({_who(owner)}) is under way or was killed; waiting up to {DEAD_AFTER_S:.0f} s to see"
        " which"
    )


def _tell(progress: Callable[[str], None], *lines: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reader of the output is gone; the resume goes on
        for line in lines:
            progress(line)


def _cancel(run: RunDir) -> str:
    return f"`{hints.command('cancel', RUN=run.name)}` ends it first"


def _kits(frozen: Mapping[str, Any], new: bool) -> dict[str, tuple[str, str]]:
    """The change of the kit's code, by the commits it has."""
    return {"kit": (str(frozen.get("versions", {}).get("commit")), commit())} if new else {}


def _over(segments: int) -> str:
    """What a run that goes on has behind it."""
    if not segments:
        return ""
    return ", segment 1 is over" if segments == 1 else f", segments 1 to {segments} are over"
