"""Slurm's client commands, as far as the kit asks them. None of it needs accounting (slurmdbd).

Nothing that comes back is taken on trust: sites put notices on the clients' output and wrappers around them. Each line
that the kit asks for begins with a mark of its own, and what sbatch calls a job is looked up before it is used.
"""

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
# running segment cannot be seen. sbatch also passes SLURM_* and SPANK_* on to the job, and PMI_* steer its srun.
_CLIENT_OPTION = re.compile(
    r"(SLURM|SLURMD|SQUEUE|SCANCEL|SINFO|SBATCH|SALLOC|SRUN|SACCT|SACCTMGR|SCONTROL|SPANK|_SLURM_SPANK_OPTION|PMIX?)_"
)
_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", TOKEN := "SLURM_JWT")
# Begins each line of an answer, in the form (--format) that is asked for; the batch script has it too.
MARK = "dsv4kit|"
# States that no job leaves again by itself.
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)


@dataclass(frozen=True)
class JobState:
    """One job as Slurm shows it; `reason` is why it is pending or what its nodes are."""

    state: str
    reason: str


@dataclass(frozen=True)
class NodeCount:
    """Nodes of a partition: all it has, and those that are neither down nor drained now."""

    there: int
    usable: int


class Slurm:
    """The client commands of one cluster; `env` is what they need besides the caller's environment (SLURM_CONF).

    `down`: why this cluster is known to give no answer, and so is not asked.
    """

    def __init__(self, env: Mapping[str, str] | None = None, down: str | None = None) -> None:
        self._given = dict(env or {})
        known = {**os.environ, **self._given}
        self._hidden = sorted(key for key in known if key not in _CLUSTER and _CLIENT_OPTION.match(key))
        self._env = {key: value for key, value in known.items() if key not in self._hidden}
        self._down = down

    @property
    def job_environment(self) -> dict[str, str]:
        """The environment a submitted job starts with."""
        return {key: self._env[key] for key in _CARRIED if key in self._env}

    @property
    def token(self) -> str | None:
        """What the caller shows Slurm in place of munge's word (auth/jwt)."""
        return self._env.get(TOKEN)

    def command(self, *argv: str) -> list[str]:
        """`argv` for whoever runs it in the caller's environment: without what would steer Slurm's clients.

        It names variables and shows no value of the caller's: command lines can be read by everybody.
        """
        given = [f"{key}={value}" for key, value in self._given.items() if key not in self._hidden]
        hidden = [word for key in self._hidden for word in ("-u", key)]
        return ["env", *hidden, *given, *argv] if hidden or given else list(argv)

    def run(self, *command: str) -> str:
        """Output of a client command; its error becomes one line for the user."""
        if self._down:
            raise UserError(self._down)
        try:
            done = subprocess.run(
                command, env=self._env, capture_output=True, text=True, errors="replace", timeout=60, check=False
            )
        except FileNotFoundError:
            raise UserError(f"Slurm is not reachable: there is no {command[0]} on this machine's PATH") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"Slurm is not reachable: {command[0]} gave no answer in 60 s") from None
        if done.returncode != 0:
            raise UserError(
                f"{command[0]} failed: {error_lines(done.stderr) or error_lines(done.stdout) or 'silently'}"
            )
        return done.stdout

    def rows(self, fields: int, *command: str) -> list[list[str]]:
        """The marked lines of an answer, split at `|` into so many fields, the last of which may have any text.

        Other lines (a site's notices) are ignored.
        """
        found = []
        for line in self.run(*command).splitlines():
            _, mark, answer = line.partition(MARK)
            if not mark:
                continue
            values = answer.split("|", fields - 1)
            if len(values) < fields:
                raise UserError(f"{command[0]}: {line!r} is not the answer that was asked for ({fields} fields)")
            found.append(values)
        return found

    def record(self, first: str, *command: str) -> dict[str, str]:
        """`key=value` words of the line of `scontrol show -o` that begins with the key `first`."""
        for line in self.run(*command).splitlines():
            if line.startswith(f"{first}="):
                return dict(word.split("=", 1) for word in line.split() if "=" in word)
        raise UserError(f"{' '.join(command)}: no line of the answer begins with {first}=")

    def node_count(self, partition: str | None) -> NodeCount:
        """Nodes of the partition (of the default one if None)."""
        filters = ["-p", partition] if partition else []
        usable: dict[str, bool] = {}
        for node, state, name in self.rows(3, "sinfo", "-h", "-N", "-o", f"{MARK}%N|%T|%P", *filters):
            if partition or name.endswith("*"):
                usable[node] = not state.startswith(("down", "drain", "fail", "unknown"))
        return NodeCount(len(usable), sum(usable.values()))

    def default_partition(self) -> str:
        """Where a job goes that names no partition."""
        for (name,) in self.rows(1, "sinfo", "-h", "-o", f"{MARK}%P"):
            if name.endswith("*"):
                return name.rstrip("*")
        raise UserError("the cluster has no default partition; slurm.partition of the site names one")

    def states(self, job_ids: Iterable[str], job_name: str | None = None) -> dict[str, JobState]:
        """States of the jobs Slurm still remembers, and of all others of that name; the rest is left out."""
        wanted = set(job_ids)
        if not wanted and job_name is None:
            return {}
        # Asked for by user: `squeue -j` fails as a whole once it has forgotten one of the jobs.
        answer = self.rows(4, "squeue", "--me", "-h", "-t", "all", "-o", f"{MARK}%i|%T|%j|%R")
        return {
            job_id: JobState(state, reason)
            for job_id, state, name, reason in answer
            if job_id in wanted or name == job_name
        }

    def all_states(self) -> dict[str, JobState]:
        """States of all of this user's jobs that Slurm still remembers."""
        answer = self.rows(3, "squeue", "--me", "-h", "-t", "all", "-o", f"{MARK}%i|%T|%R")
        return {job_id: JobState(state, reason) for job_id, state, reason in answer}

    def comment(self, job_id: str) -> str | None:
        """The comment that a job carries; None without one."""
        found = self.rows(1, "squeue", "-h", "-t", "all", "-j", job_id, "-o", f"{MARK}%k")
        return found[0][0] if found and found[0][0] not in ("", "(null)") else None

    def named(self, job_name: str) -> dict[str, str]:
        """Job id -> state of this user's jobs of that name."""
        answer = self.rows(2, "squeue", "--me", "-h", "-t", "all", f"--name={job_name}", "-o", f"{MARK}%i|%T")
        return {job_id: state for job_id, state in answer}  # noqa: C416  # mypy does not take a list of lists for pairs

    def live(self, job_name: str) -> dict[str, str]:
        """Those of them that are not over; one that Slurm is still clearing away (COMPLETING) is over."""
        over = (*ENDED, "COMPLETING")
        return {job_id: state for job_id, state in self.named(job_name).items() if state not in over}

    def confirm(self, job_id: str, job_name: str, after: str | None) -> None:
        """Asks for a job just submitted: there, ours, and behind the job it was told to wait for. Raises if not."""
        try:
            found = self.rows(4, "squeue", "-h", "-t", "all", "-j", job_id, "-o", f"{MARK}%i|%T|%E|%j")
        except UserError as error:
            raise UserError(f"sbatch named job {job_id}, which cannot be found: {error}") from None
        if not found:
            raise UserError(f"sbatch named job {job_id}, and there is no such job")
        _, state, waits_for, name = found[0]
        if name != job_name:
            raise UserError(f"sbatch named job {job_id}, which is {name!r} and not {job_name!r}")
        if after is None or state in ENDED or re.search(rf"afterany:{after}\b", waits_for):
            return
        # A dependency that is fulfilled is not shown any more.
        earlier = self.states([after]).get(after)
        if earlier and earlier.state not in ENDED:
            raise UserError(f"job {job_id} does not wait for job {after}, as sbatch was told: it waits for {waits_for}")

    def unfinished(self) -> dict[str, list[str]]:
        """Job name -> states of its jobs that wait or run, everybody's; counted: `1 running`, `2 pending`."""
        found: dict[str, Counter[str]] = {}
        for state, name in self.rows(2, "squeue", "-h", "-o", f"{MARK}%T|%j"):
            found.setdefault(name, Counter())[state.lower()] += 1
        return {name: [f"{count} {state}" for state, count in sorted(states.items())] for name, states in found.items()}

    def cancel_named(self, job_name: str) -> None:
        """Cancels all of this user's jobs of that name; finding none is not an error."""
        self.run("scancel", "--me", f"--name={job_name}")

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancels the jobs; jobs that are already over are not an error."""
        if job_ids:
            self.run("scancel", *job_ids)


def error_lines(text: str) -> str:
    """All that a client says is wrong, on one line: Slurm's plugins often give the reason in a line of their own."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join([line for line in lines if "error:" in line] or lines[-1:])


def submitted_job(output: str) -> str:
    """The job id in the output of `sbatch --parsable`: its last line, `id` or `id;cluster`. Raises ValueError."""
    last = output.strip().splitlines()[-1:]
    found = re.fullmatch(r"(\d+)(;\S+)?", last[0].strip()) if last else None
    if not found:
        raise ValueError(f"no job id in the last line of its output: {(last or [''])[0]!r}")
    return found[1]
