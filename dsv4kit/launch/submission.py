"""A run about to be submitted: what would be written and sent is made first, as values; only then anything happens."""

from __future__ import annotations

import errno
import functools
import math
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import dsv4kit
from dsv4kit import hints
from dsv4kit.config.loading import Resolved, source_of
from dsv4kit.config.paths import ROOT
from dsv4kit.config.site import Site
from dsv4kit.errors import UserError
from dsv4kit.feasibility import image_needs, image_rules, verl_rules
from dsv4kit.feasibility.case import Case, ImageFacts
from dsv4kit.feasibility.node_memory import needed_gib
from dsv4kit.feasibility.refusals import at_submission, refuse
from dsv4kit.feasibility.run_layout import pipeline_layout
from dsv4kit.feasibility.verl_rules import NOT_SET
from dsv4kit.launch import image_state, kernels, leftovers, ownership, trackers
from dsv4kit.launch.branch import Branch
from dsv4kit.launch.chain import JobsLeftError, planned, submit_segments
from dsv4kit.launch.executor import SegmentExecutor
from dsv4kit.launch.freeze import freeze, freeze_reward, with_frozen_reward
from dsv4kit.launch.image_state import ImageState
from dsv4kit.launch.render import SegmentScript
from dsv4kit.launch.run_dir import write_record
from dsv4kit.launch.segment_option import asks_for_segment
from dsv4kit.launch.slurm import Slurm
from dsv4kit.run import node_spec
from dsv4kit.run.directory import ChainLink, RunDir
from dsv4kit.run.files import temporary_name, write_json
from dsv4kit.run.node_spec import Limits, NodeResources, NodeSpec
from dsv4kit.verl_keys import overrides, rollout
from dsv4kit.verl_keys.pairs import data_parallel, is_sft

if TYPE_CHECKING:
    from dsv4kit.plan.core import Plan
    from dsv4kit.plan.verdict import Verdict

_GIB = 2**30
_STOPPING = ("dsv4kit.plugin.segment_stop", "dsv4kit.plugin.sft_segments")


@dataclass(frozen=True)
class Submission:
    """Everything `submit` needs. `python` runs on the nodes; model and data are what the kit made, if it did.

    `avoid`: nodes that the run has found bad (a resume's). Its chain begins with `first_segment` at `first_step`,
    which is a checkpoint of another run where there is a `branch`. `started_in`: the file its segments go on in (a
    resume's).
    """

    resolved: Resolved
    site: Site
    run: RunDir
    slurm: Slurm
    python: str
    model_path: str = ""
    data_dir: str = ""
    forced: bool = False
    avoid: tuple[str, ...] = ()
    first_segment: int = 1
    first_step: int = 0
    branch: Branch | None = None
    image: ImageFacts | None = None
    started_in: ImageState | None = None

    @property
    def segments(self) -> int:
        """Segments that its steps take, the spare ones not counted."""
        schedule = self.resolved.settings.schedule
        return math.ceil((schedule.steps - self.first_step) / schedule.segment_steps)

    @property
    def links(self) -> list[ChainLink]:
        """The chain, before anything of it is submitted."""
        return planned(self.first_segment, self.segments, self.resolved.settings.schedule.spare_segments)

    @property
    def left_to_segments(self) -> int:
        """How many of them the segments before submit."""
        return max(0, len(self.links) - (self.site.slurm.chain or len(self.links)))

    @functools.cached_property
    def plan(self) -> Plan | None:
        """What the planner counts; None for a model without geometry."""
        from dsv4kit.plan.of_settings import plan_of

        return plan_of(self.resolved.settings, self.site.name, asks_for_segment(self.site))

    @property
    def verdict(self) -> Verdict | None:
        """What the planner says; None for a model without geometry."""
        return self.plan and self.plan.verdict

    @functools.cached_property
    def case(self) -> Case:
        """What the rules of `feasibility` look at."""
        return Case(self.resolved.settings, self.resolved.sources, self.site, self.image, self.first_step)

    def check(self) -> None:
        """Refuses what cannot work, before anything is written."""
        refuse(self.case)
        if self.run.path.exists():
            raise UserError(
                f"RUN={self.run.name!r}: exists already in {self.run.path.parent};"
                f" `{hints.command('resume', RUN=self.run.name)}` goes on with it"
            )
        settings, sources = self.resolved.settings, self.resolved.sources
        if settings.checkpoint.directory:
            named = source_of("checkpoint.directory", sources) or "checkpoint.directory"
            ownership.check(Path(settings.checkpoint.directory), self.run, named)
            if self.branch:
                self.branch.check(Path(settings.checkpoint.directory))

    @functools.cached_property
    def image_state(self) -> ImageState | None:
        """The image's file, as every segment has to find it."""
        return self.started_in or image_state.now(self.site)

    @property
    def notes(self) -> list[str]:
        """What the image has to have and nothing here can tell."""
        return list(image_rules.unknown(self.image, self.resolved.settings)) if self.site.container.image else []

    @property
    def missing(self) -> list[str]:
        """Variables that have to be set before the run can be submitted."""
        settings = self.resolved.settings
        if settings.model.checkouts:
            return [name for name in ("MEGATRON_LM", "MEGATRON_BRIDGE") if not settings.env.get(f"DSV4KIT_{name}")]
        if settings.model.made_locally:
            return []
        wanted: list[tuple[str, object]] = [
            ("MODEL_PATH", settings.model.path),
            ("TRAIN_FILE", settings.data.train_files),
        ]
        if not is_sft(settings):
            wanted.append(("TEST_FILE", settings.data.val_files))
        return [name for name, value in wanted if not value]

    @functools.cached_property
    def layout(self) -> str | None:
        """The pipeline layout."""
        return pipeline_layout(self.resolved.settings)

    def check_cluster(self) -> None:
        """Refuses what this cluster cannot run now."""
        nodes = self.resolved.settings.schedule.nodes
        there = self.slurm.node_count(self.site.slurm.partition).there  # for one that is drained now, sbatch waits
        if nodes > there:
            raise UserError(f"NODES={nodes}: the site {self.site.name} has {there} nodes")
        for refusal in at_submission(self.case):
            raise UserError(refusal.line)

    @functools.cached_property
    def overrides(self) -> list[str]:
        """verl's overrides as argv of the driver, checked against verl's own configuration."""
        told = overrides.traced(
            with_frozen_reward(self.resolved.settings, self.run),
            run_name=self.run.name,
            model_path=self.model_path or NOT_SET,
            data_dir=self.data_dir or NOT_SET,
            run_dir=str(self.run.path),
            kit_dir=str(self.run.kit),
            layout=self.layout,
        )
        return verl_rules.render(self.case, told)

    def node_spec(self) -> NodeSpec:
        """What the agents are told."""
        settings, run = self.resolved.settings, self.run.path
        checkpoints = overrides.checkpoint_dir(settings, str(run))
        return NodeSpec(
            run=self.run.name,
            run_dir=str(run),
            nodes=settings.schedule.nodes,
            total_steps=settings.schedule.steps,
            segment_steps=settings.schedule.segment_steps,
            checkpoint_dir=checkpoints,
            quarantine_dir=str(self.run.quarantine),
            checkpoint_contents=list(settings.checkpoint.contents),
            module=settings.recipe.module,
            overrides=self.overrides,
            env={
                **self._env(),
                "VERL_USE_EXTERNAL_MODULES": ",".join(name for name, wanted in settings.plugins.items() if wanted),
            },
            rollout_seed=rollout.seed(settings),
            stops_by_plugin=any(settings.plugins.get(plugin) for plugin in _STOPPING),
            launcher=settings.recipe.launcher,
            data_ranks=data_parallel(settings) if is_sft(settings) else None,
            device=settings.hardware.device,
            cpu_numa_nodes=list(settings.hardware.cpu_numa_nodes),
            setup=list(self.site.setup),
            setup_limit_s=self.site.setup_limit_s,
            interface=self.site.network.interface,
            scratch_dir=self.site.scratch_dir,
            sample_interval_s=settings.watch.sample_interval_s,
            ray=NodeResources(
                cpus=settings.hardware.cpus_per_node,
                gpus=settings.hardware.gpus_per_node,
                object_store_bytes=int(settings.ray.object_store_gib * _GIB),
                ready_deadline_s=settings.ray.ready_deadline_s,
            ),
            limits=Limits(
                min_memory_bytes=int(needed_gib(settings, self.plan) * _GIB),
                min_shm_bytes=int(settings.hardware.min_shm_gib * _GIB),
                stall_s=settings.watch.stall_s,
                max_attempts_without_progress=settings.watch.max_attempts_without_progress,
                restarts=settings.watch.restarts,
                save_s=round(self.plan.segment.timing.save_s, 1) if self.plan else 0.0,
            ),
            keep_last=settings.checkpoint.keep_last,
            keep_every=settings.checkpoint.keep_every,
            keep_best=settings.checkpoint.keep_best,
            needs=self._needs(),
            kernels=kernels.told(self.resolved.settings, self.site, self.python),
            gates=settings.watch.gates.model_dump(),
        )

    def _needs(self) -> dict[str, Any]:
        """What the nodes look for in the image, and which stack would have it."""
        from dsv4kit.image.stack import stack_of

        needs = image_needs.of_run(self.resolved.settings, self.overrides)
        if needs and (stack := stack_of(self.resolved.settings.hardware.name, self.resolved.settings.recipe.name)):
            needs["stack"] = stack.name
        return needs

    def _env(self) -> dict[str, str]:
        """The profile's environment, the site's over it, and over both what the user set by hand."""
        settings, sources = self.resolved.settings, self.resolved.sources
        by_hand = {key: v for key, v in settings.env.items() if sources.get(f"env.{key}", "").startswith("SET ")}
        tracked = trackers.environment(self.run, settings.loggers)
        return {**tracked, **settings.env, **self.site.env, **by_hand}

    def frozen(self) -> dict[str, Any]:
        """`run.yaml`."""
        import importlib.metadata

        return {
            "run": self.run.name,
            "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "settings": self.resolved.settings.model_dump(),
            "sources": dict(self.resolved.sources),
            "site": self.site.model_dump(),
            "image": self.image_state and self.image_state._asdict(),
            "python": self.python,
            "plan": self._planned(),
            "forced": self.forced,
            **({"from": self.branch.as_dict()} if self.branch else {}),
            "versions": {
                "dsv4kit": dsv4kit.__version__,
                "commit": commit(),
                "verl configuration": importlib.metadata.version("verl"),
                "submitit": importlib.metadata.version("submitit"),
            },
        }

    def _planned(self) -> dict[str, Any] | None:
        """What the planner says, kept for the report to compare with what is measured."""
        from dsv4kit.plan.shown.as_json import as_json

        if self.plan is None:
            return None
        told = as_json(self.plan)
        return {"verdict": told["verdict"], "reasons": told["reasons"], "predicted": told}

    def rendered(self) -> dict[str, Any]:
        """What would be submitted: the first script, the commands of the chain, and what the agents would be told.

        Each segment has its own copy of the script.
        """
        return {
            "run": self.run.name,
            "directory": str(self.run.path),
            "missing": self.missing,
            "script": self.executor(1, None).script_text(),
            "commands": [self._sbatch(link.segment) for link in self.links[: self.site.slurm.chain]],
            "left_to_segments": self.left_to_segments,
            "spare_segments": [link.segment for link in self.links if link.spare],
            "node_spec": self.node_spec().as_dict(),
            "plan": self._planned(),
        }

    def _sbatch(self, segment: int) -> list[str]:
        after = f"<job id of segment {segment - 1}>" if segment > 1 else None
        return self.executor(segment, after).sbatch_command(str(self.run.segment(segment).script))

    def dry_run(self) -> str:
        """As `rendered`, for people."""
        parts = [f"# to be set before this can be submitted: {', '.join(self.missing)}"] if self.missing else []
        parts += [f"# {self.run.segment(1).script}", self.executor(1, None).script_text()]
        parts.append("# submitted as (each segment has its own copy of the script)")
        for link in self.links[: self.site.slurm.chain]:
            parts.append(f"{shlex.join(self._sbatch(link.segment))}{'  # spare' if link.spare else ''}")
        if self.left_to_segments:
            parts.append(f"# and {self.left_to_segments} more by the segments before them (submit_next.sh)")
        parts += [
            "",
            f"# {self.run.node_spec_file}",
            yaml.safe_dump(self.node_spec().as_dict(), sort_keys=False, width=200),
        ]
        return "\n".join(parts)

    def submit(self, progress: Callable[[str], None]) -> None:
        """Writes the run directory and submits the chain. On any failure nothing of it is left."""
        for line in leftovers.sweep(self.run.path.parent):
            progress(line)
        staging = RunDir(self.run.path.with_name(temporary_name(self.run.name)))
        spec = self.node_spec()
        claimed = None
        try:
            if self.resolved.settings.checkpoint.directory:  # a container's mount has to be there
                os.makedirs(spec.checkpoint_dir, exist_ok=True)
                claimed = Path(spec.checkpoint_dir) if ownership.claim(Path(spec.checkpoint_dir), self.run) else None
            freeze(staging.kit)
            freeze_reward(self.resolved.settings, staging)
            node_spec.write(staging, spec.as_dict())
            write_record(staging, self.frozen())
            staging.save_chain([], self.run.job_name)
            if spec.kernels and (brought := kernels.bring(self.run, staging, spec.kernels.key)):
                progress(brought)
            if self.branch:
                write_json(staging.origin_file, self.branch.as_dict())
                own = self.resolved.settings.checkpoint.directory
                self.branch.bring(Path(own) if own else staging.checkpoints, progress)
            staging.path.rename(self.run.path)
            if not self.resolved.settings.checkpoint.directory:
                ownership.claim(Path(spec.checkpoint_dir), self.run)
        except BaseException as error:
            self._disown(claimed)
            shutil.rmtree(staging.path, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise UserError(f"RUN={self.run.name!r}: exists already; somebody else has just submitted it") from None
            raise
        try:
            limit = self.site.slurm.chain
            submit_segments(self.run, self.links, self.executor, progress, self.slurm, limit=limit)
        except JobsLeftError:
            raise
        except BaseException:
            self._disown(claimed)
            shutil.rmtree(self.run.path, ignore_errors=True)
            raise

    def _disown(self, directory: Path | None) -> None:
        """Gives a checkpoint directory of the user's back as it was."""
        if directory:
            (directory / ownership.OWNER).unlink(missing_ok=True)
            if self.branch:
                self.branch.take_back(directory)

    def executor(self, segment: int, after: str | None) -> SegmentExecutor:
        """What submits a segment of it, behind the job `after`."""
        last = self.links[-1].segment if self.left_to_segments else None
        settings, state = self.resolved.settings, self.image_state
        script = SegmentScript(settings, self.site, self.run, segment, self.avoid, last, state)
        return make_executor(script, self.python, self.slurm, after)


def make_executor(script: SegmentScript, python: str, slurm: Slurm, after: str | None) -> SegmentExecutor:
    """The executor of one segment."""
    return SegmentExecutor(script.run.segment(script.segment).submitit, script, python, slurm, after)


def commit() -> str:
    """State of the kit's clone: commit, and whether it was changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
