"""What a running segment's processes are doing, asked from the login node through the run directory."""

from __future__ import annotations

from dsv4kit.errors import UserError
from dsv4kit.launch.slurm import Slurm
from dsv4kit.run import node_spec, stacks
from dsv4kit.run.directory import RunDir
from dsv4kit.run.stacks import ProcessStack


def ask_running(run: RunDir, slurm: Slurm) -> tuple[list[ProcessStack], int]:
    """The processes of the nodes that answered, and how many nodes there are. Raises UserError where nothing runs."""
    jobs = slurm.states(link.job_id for link in run.chain())
    running = [link for link in run.chain() if link.job_id in jobs and jobs[link.job_id].state == "RUNNING"]
    attempts = run.segment(running[-1].segment).attempts() if running else []
    if not attempts:
        raise UserError(f"{run.name}: no segment is running, so there is nothing to explain")
    nodes = node_spec.read_as_dict(run)["nodes"]
    return stacks.ask(attempts[-1], nodes), nodes
