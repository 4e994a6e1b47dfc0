"""A checkpoint becomes a Hugging Face directory: a job beside the run's chain, in the run's own container."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError

from dsv4kit.checkpoint import inspection
from dsv4kit.checkpoint.inspection import CheckpointLayout, StepState
from dsv4kit.checkpoint.shard_files import read_json_object
from dsv4kit.config.frozen import frozen_settings
from dsv4kit.config.schema import Settings
from dsv4kit.config.site import Site
from dsv4kit.errors import UserError
from dsv4kit.launch.doctor_visit import Visit
from dsv4kit.launch.executor import SegmentExecutor
from dsv4kit.launch.freeze import freeze
from dsv4kit.launch.render import SegmentScript
from dsv4kit.launch.run_dir import read_record
from dsv4kit.launch.slurm import Slurm, error_lines
from dsv4kit.node.export import run as run_export
from dsv4kit.run import export, node_spec
from dsv4kit.run.directory import RunDir
from dsv4kit.run.errors import DamagedFileError
from dsv4kit.run.export import ExportRequest
from dsv4kit.run.node_spec import NodeSpec
from dsv4kit.verl_keys import chat_template

_GB = 1e9
# verl's merger holds the shards in the checkpoint's precision and joins them in bfloat16.
_MEMORY_PER_BYTE = 2
_LEAST_MEMORY = 2**30


@dataclass(frozen=True)
class Export:
    """One export, checked. Made by `of`; nothing is written before `send`."""

    run: RunDir
    step: int
    request: ExportRequest
    settings: Settings
    site: Site
    python: str
    spec: NodeSpec
    weight_bytes: int
    slurm: Slurm

    @property
    def place(self) -> RunDir:
        """Its directory."""
        return export.place(self.run, self.step)

    @property
    def model(self) -> Path:
        """Where the exported model is to be."""
        return export.model(self.place)

    @property
    def space(self) -> str:
        """What it takes, for the user; as much as the weights of the checkpoint at most."""
        free = shutil.disk_usage(self.run.path).free
        return f"up to {self.weight_bytes / _GB:.3g} GB of {free / _GB:.3g} GB free"

    def check(self) -> None:
        """Refuses what is there, or is being made, and what has no room."""
        if self.model.exists():
            raise UserError(f"STEP={self.step}: is exported already: {self.model}")
        if live := self.slurm.live(self.place.job_name):
            raise UserError(f"STEP={self.step}: is being exported by job {', '.join(live)}")
        free = shutil.disk_usage(self.run.path).free
        if free < self.weight_bytes:
            raise UserError(
                f"{self.run.path}: {free / _GB:.3g} GB are free, the export of step {self.step} may take"
                f" {self.weight_bytes / _GB:.3g} GB"
            )

    def send(self) -> Visit:
        """Submits the job; its directory is made anew."""
        place = self.place
        shutil.rmtree(place.path, ignore_errors=True)  # of an export that failed
        freeze(place.kit)
        node_spec.write(place, self._spec().as_dict())
        export.write(place, self.request)
        executor = SegmentExecutor(place.segment(1).submitit, self.script(), self.python, self.slurm)
        try:
            executor.prepare(run_export, str(place.path))
            job_id = executor.submit_prepared()
            self.slurm.confirm(job_id, place.job_name, None)
        except (FailedJobError, FailedSubmissionError) as error:
            raise UserError(f"sbatch refused the export's job: {error_lines(str(error))}") from None
        return Visit(place, job_id, self.slurm, 1)

    def script(self) -> SegmentScript:
        """Its batch script: a segment's, for one node, that sees the run's checkpoints."""
        schedule = self.settings.schedule.model_copy(update={"nodes": 1, "steps": 1, "segment_steps": 1})
        checkpoint = self.settings.checkpoint.model_copy(update={"directory": self.spec.checkpoint_dir})
        settings = self.settings.model_copy(update={"schedule": schedule, "checkpoint": checkpoint})
        return SegmentScript(settings, self.site, self.place, 1)

    def _spec(self) -> NodeSpec:
        memory = max(_LEAST_MEMORY, _MEMORY_PER_BYTE * self.weight_bytes)
        return dataclasses.replace(
            self.spec,
            run_dir=str(self.place.path),
            nodes=1,
            module="dsv4kit.node.export",
            launcher="torchrun",
            overrides=[],
            rollout_seed=None,
            ray=dataclasses.replace(self.spec.ray, gpus=1),
            limits=dataclasses.replace(self.spec.limits, min_memory_bytes=memory, min_shm_bytes=0),
        )


def of(run: RunDir, slurm: Slurm, step: int | None) -> Export:
    """The export of that step, or of the newest complete one. Raises UserError where there is nothing to export."""
    frozen = read_record(run)
    try:
        settings, site = frozen_settings(frozen["settings"]), Site.model_validate(frozen["site"])
        spec = NodeSpec.load(run)
    except (OSError, ValueError, TypeError, KeyError):
        raise DamagedFileError.of(run.node_spec_file, "what the run's nodes are told") from None
    state = chosen(run, Path(spec.checkpoint_dir), step)
    request = requested(state, chat_template.read(settings.model.chat_template_file))
    size = inspection.weight_bytes(Path(request.checkpoint, request.weights))
    return Export(run, state.step, request, settings, site, frozen["python"], spec, size, slurm)


def chosen(run: RunDir, directory: Path, step: int | None) -> StepState:
    """A complete checkpoint: of that step, or the newest. Raises UserError."""
    states = {state.step: state for state in inspection.inspect(directory).steps}
    complete = [number for number, state in states.items() if state.complete]
    shown = ", ".join(map(str, complete)) or "none"
    if not complete and step is None:
        raise UserError(f"RUN={run.name}: no complete checkpoint in {directory} yet")
    wanted = max(complete) if step is None else step
    if wanted not in states:
        raise UserError(f"STEP={wanted}: no checkpoint of that step in {directory}; complete are: {shown}")
    if wanted not in complete:
        raise UserError(f"STEP={wanted}: its checkpoint is not whole: {states[wanted].findings[0]}; complete: {shown}")
    return states[wanted]


def requested(state: StepState, template: str | None) -> ExportRequest:
    """What is to be made of a checkpoint. Raises UserError for Megatron's own shards alone."""
    sft = state.layout in (CheckpointLayout.SFT_FSDP, CheckpointLayout.SFT_MEGATRON)
    engine = state.path if sft else inspection.actor_directory(state.path)
    if state.layout in (CheckpointLayout.SFT_FSDP, CheckpointLayout.PPO_FSDP):
        return ExportRequest(str(engine), export.FSDP, "", template)
    contents = (read_json_object(engine / inspection.MANIFEST_NAME) or {}).get("contents", {})
    for name in ("hf_model", "model"):
        entry = contents.get(name)
        if isinstance(entry, dict) and entry.get("format") == "huggingface":
            return ExportRequest(str(engine), export.HUGGING_FACE, str(entry["path"]), template)
    raise UserError(
        f"{engine}: its weights are Megatron's own shards alone, which nothing here joins; a run submitted with"
        ' SET="checkpoint.contents=[model,hf_model,extra]" has a Hugging Face directory beside them'
    )
