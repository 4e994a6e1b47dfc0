"""The batch script of a segment, rendered from `templates/segment.sbatch.j2`."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4kit.config import time_limit
from dsv4kit.config.paths import ROOT
from dsv4kit.config.schema import Settings
from dsv4kit.config.site import Site
from dsv4kit.launch import mounts
from dsv4kit.launch.freeze import IMAGE_MOUNT
from dsv4kit.launch.image_state import ImageState
from dsv4kit.launch.segment_option import knows_segment
from dsv4kit.run.directory import RunDir
from dsv4kit.templates import environment
from dsv4kit.verl_keys.overrides import checkpoint_dir


def submit_next_text() -> str:
    """What submits the next segments from within one, where not all are in the queue at once."""
    return (ROOT / "templates" / "submit_next.sh").read_text(encoding="utf-8")


def conclude_text() -> str:
    """What a segment's batch script runs at its end; each segment has its own copy, so no run changes halfway."""
    return (ROOT / "templates" / "conclude.sh").read_text(encoding="utf-8")


@dataclass(frozen=True)
class SegmentScript:
    """All that the script of one segment depends on.

    `avoid`: nodes that earlier segments found bad. `last`: number of its chain's last segment, where a segment has to
    submit those behind it; None where all are submitted at once. `image`: the file that the segment may start in, as it
    was. `look`: a directory for what each node has for enroot.
    """

    settings: Settings
    site: Site
    run: RunDir
    segment: int
    avoid: tuple[str, ...] = ()
    last: int | None = None
    image: ImageState | None = None
    look: str | None = None

    def render(self, submitit_command: str) -> str:
        """The script; `submitit_command` is the payload submitit wants run on every node."""
        settings, slurm, container = self.settings, self.site.slurm, self.site.container
        return (
            environment()
            .get_template("segment.sbatch.j2")
            .render(
                run=self.run.name,
                job_name=self.run.job_name,
                segment=self.segment,
                run_dir=str(self.run.path),
                segment_dir=str(self.run.segment(self.segment).path),
                kit_dir=str(self.run.kit),
                segment_steps=settings.schedule.segment_steps,
                total_steps=settings.schedule.steps,
                nodes=settings.schedule.nodes,
                gpus_per_node=settings.hardware.gpus_per_node,
                cpus_per_task=slurm.cpus_per_task or settings.hardware.cpus_per_node,
                time=settings.schedule.time,
                time_limit_s=time_limit.seconds(settings.schedule.time),
                slurm=slurm,
                exclude=",".join(filter(None, [slurm.exclude, *self.avoid])),
                block_nodes=self._block_nodes(),
                knows_segment=knows_segment(slurm.version),
                env=self.site.env,
                secrets_file=self.site.secrets_file,
                container=container,
                image_state=self.image,
                image_mount=IMAGE_MOUNT,
                scratch_dir=self.site.scratch_dir,
                mounts=mounts.of(settings, self.site, self.run) if container.runtime != "none" else [],
                submitit_command=submitit_command,
                checkpoint_dir=checkpoint_dir(settings, str(self.run.path)),
                last=self.last,
                look=self.look if container.runtime == "pyxis" else None,
                attempt_limit=settings.watch.max_attempts_without_progress,
            )
        )

    def _block_nodes(self) -> int | None:
        """Nodes that should stand together in one NVLink domain; None where that does not apply."""
        from dsv4kit.plan.counted.topology import slurm_segment
        from dsv4kit.plan.from_settings import question

        asked = question(self.settings) if self.site.slurm.block_topology else None
        return slurm_segment(asked) if asked else None
