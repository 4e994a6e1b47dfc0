"""The batch script of a segment, rendered from `templates/segment.sbatch.j2`."""

from __future__ import annotations

from dataclasses import dataclass

import jinja2

from dsv4kit import quoting
from dsv4kit.config import time_limit
from dsv4kit.config.loading import ROOT
from dsv4kit.config.schema import Settings, Site
from dsv4kit.launch.run_dir import RunDir


def environment() -> jinja2.Environment:
    """Jinja as all templates of the kit use it: an unknown variable is an error, never an empty text."""
    loader = jinja2.FileSystemLoader(ROOT / "templates")
    made = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"shell": quoting.shell, "sbatch": quoting.sbatch}
    return made


@dataclass(frozen=True)
class SegmentScript:
    """All that the script of one segment depends on."""

    settings: Settings
    site: Site
    run: RunDir
    segment: int

    def render(self, submitit_command: str) -> str:
        """The script; `submitit_command` is the payload submitit wants run on every node."""
        settings, slurm = self.settings, self.site.slurm
        return (
            environment()
            .get_template("segment.sbatch.j2")
            .render(
                run=self.run.name,
                job_name=self.run.job_name,
                segment=self.segment,
                segment_dir=str(self.run.segment(self.segment)),
                kit_dir=str(self.run.kit),
                segment_steps=settings.schedule.segment_steps,
                total_steps=settings.schedule.steps,
                nodes=settings.schedule.nodes,
                gpus_per_node=settings.hardware.gpus_per_node,
                cpus_per_task=settings.hardware.cpus_per_node,
                time=settings.schedule.time,
                time_limit_s=time_limit.seconds(settings.schedule.time),
                gpu_option=slurm.gpu_option,
                grace_s=slurm.grace_s,
                requeue=slurm.requeue,
                partition=slurm.partition,
                account=slurm.account,
                qos=slurm.qos,
                extra=slurm.extra,
                submitit_command=submitit_command,
            )
        )
