"""Slurm's client commands, as far as the kit asks them. None of it needs accounting (slurmdbd)."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsv4kit.errors import UserError

# What a job needs of the submitting shell. The rest stays there: it may hold secrets, or steer srun and Python.
_CARRIED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "SLURM_CONF", "TZ", "USER")
# What reaches Slurm's clients of Slurm's own variables: where the cluster is and who asks. All others are options (the
# "INPUT ENVIRONMENT VARIABLES" of the man pages) and would filter or rewrite the answers: with SQUEUE_PARTITION set, a
# running segment cannot be seen.
_CLIENT_OPTION = re.compile(r"(SLURM|SQUEUE|SCANCEL|SINFO|SBATCH|SALLOC|SRUN|SACCT|SACCTMGR|SCONTROL)_")
_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")


@dataclass(frozen=True)
class JobState:
    """One job as Slurm shows it; `reason` is why it is pending or what its nodes are."""

    state: str
    reason: str


class Slurm:
    """The client commands of one cluster; `env` is what they need besides the caller's environment (SLURM_CONF).

    `down`: why this cluster is known to give no answer, and so is not asked.
    """

    def __init__(self, env: Mapping[str, str] | None = None, down: str | None = None) -> None:
        known = {**os.environ, **(env or {})}
        self._env = {key: known[key] for key in known if key in _CLUSTER or not _CLIENT_OPTION.match(key)}
        self._down = down

    @property
    def job_environment(self) -> dict[str, str]:
        """The environment a submitted job starts with."""
        return {key: self._env[key] for key in _CARRIED if key in self._env}

    def run(self, *command: str) -> str:
        """Output of a client command; its error becomes one line for the user."""
        if self._down:
            raise UserError(self._down)
        try:
            done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=60, check=False)
        except FileNotFoundError:
            raise UserError(f"Slurm is not reachable: there is no {command[0]} on this machine's PATH") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"Slurm is not reachable: {command[0]} gave no answer in 60 s") from None
        if done.returncode != 0:
            message = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[0]
            raise UserError(f"{command[0]} failed: {message}")
        return done.stdout

    def node_count(self, partition: str | None) -> int:
        """Nodes of the partition (of the default one if None) that are not down or drained."""
        filters = ["-p", partition] if partition else []
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T %P", *filters).splitlines()
        usable: set[str] = set()
        for line in lines:
            node, state, name = line.split()
            if (partition or name.endswith("*")) and not state.startswith(("down", "drain", "fail", "unknown")):
                usable.add(node)
        return len(usable)

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """States of the jobs Slurm still remembers; the others are left out."""
        wanted = list(job_ids)
        if not wanted:
            return {}
        found = {}
        # Asked for by user: `squeue -j` fails as a whole once it has forgotten one of the jobs.
        for line in self.run("squeue", "--me", "-h", "-t", "all", "-o", "%i|%T|%R").splitlines():
            job_id, state, reason = line.split("|", 2)
            if job_id in wanted:
                found[job_id] = JobState(state, reason)
        return found

    def states_named(self, job_name: str) -> list[str]:
        """States of this user's jobs of that name."""
        return self.run("squeue", "--me", "-h", "-t", "all", f"--name={job_name}", "-o", "%T").split()

    def unfinished(self) -> dict[str, list[str]]:
        """Job name -> states of its jobs that wait or run, everybody's; counted: `1 running`, `2 pending`."""
        found: dict[str, Counter[str]] = {}
        for line in self.run("squeue", "-h", "-o", "%T|%j").splitlines():
            state, name = line.split("|", 1)
            found.setdefault(name, Counter())[state.lower()] += 1
        return {name: [f"{count} {state}" for state, count in sorted(states.items())] for name, states in found.items()}

    def cancel_named(self, job_name: str) -> None:
        """Cancels all of this user's jobs of that name; none is no error."""
        self.run("scancel", "--me", f"--name={job_name}")

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancels the jobs; those already over are no error."""
        if job_ids:
            self.run("scancel", *job_ids)
