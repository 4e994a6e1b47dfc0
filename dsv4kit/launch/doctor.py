"""What can be known on the login node before a job is submitted: one finding per question, the worst decides."""

from __future__ import annotations

import getpass
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsv4kit.config import time_limit
from dsv4kit.errors import UserError
from dsv4kit.feasibility import image_rules, site_files
from dsv4kit.feasibility.refusals import refusals
from dsv4kit.image import contents, fit, patches
from dsv4kit.launch.segment_option import knows_segment
from dsv4kit.launch.submission import Submission

Level = Literal["ok", "warning", "problem"]

_TB = 1e12
# Not asked where Slurm gives no answer.
_OF_SLURM = ("options", "partition", "account", "sbatch")
# As `stat --file-system` names them. Slurm's nodes see none of these unless they are this machine.
_LOCAL = ("btrfs", "ext2/ext3", "overlayfs", "ramfs", "tmpfs", "xfs", "zfs")


@dataclass(frozen=True)
class Finding:
    """One answer: what was asked about, how it is, and what that means."""

    level: Level
    topic: str
    text: str


def examine(submission: Submission) -> Iterator[Finding]:
    """All findings, in the order in which they matter. Only looks, but for one `sbatch --test-only`."""
    reachable = True
    for topic, check in _CHECKS:
        if topic in _OF_SLURM and not reachable:
            continue
        try:
            yield from check(submission)
        except UserError as error:
            yield Finding("problem", topic, str(error))
            reachable = reachable and topic != "slurm"


def slurm(submission: Submission) -> Iterator[Finding]:
    """Whether Slurm answers, and is the one the site says."""
    answer = submission.slurm.run("sbatch", "--version")
    if not (found := re.search(r"^slurm\S* (\d+\.\S+)", answer, re.MULTILINE)):
        raise UserError(f"sbatch --version: its answer {answer.strip()!r} names no version of Slurm")
    version = found[1]
    pinged = submission.slurm.run("scontrol", "ping").splitlines()
    state = next((line.strip() for line in pinged if line.startswith("Slurmctld")), "no controller answers")
    yield Finding("ok" if "UP" in state else "problem", "slurm", f"{version}; {state}")
    said = submission.site.slurm.version
    if said and said.split(".")[:2] != version.split(".")[:2]:
        yield Finding("warning", "slurm", f"slurm.version of the site says {said}; options follow what it says")


def options(submission: Submission) -> Iterator[Finding]:
    """Whether sbatch and srun know what the script asks of them."""
    site = submission.site
    if site.container.runtime == "pyxis":
        there = "--container-image" in submission.slurm.run("srun", "--help")
        text = "srun knows --container-image" if there else "srun has no --container-image: pyxis is not installed here"
        yield Finding("ok" if there else "problem", "pyxis", text)
    if site.slurm.block_topology:
        there = "--segment" in submission.slurm.run("sbatch", "--help")
        if knows_segment(site.slurm.version) and not there:
            yield Finding("problem", "--segment", "sbatch has no such option and would refuse the script")
        elif there and not knows_segment(site.slurm.version):
            yield Finding("warning", "--segment", "sbatch has it; slurm.version of the site says otherwise: not used")


def partition(submission: Submission) -> Iterator[Finding]:
    """Limits of the partition against the run's."""
    schedule = submission.resolved.settings.schedule
    name = submission.site.slurm.partition or submission.slurm.default_partition()
    shown = submission.slurm.record("PartitionName", "scontrol", "show", "partition", "-o", name)
    nodes = submission.slurm.node_count(submission.site.slurm.partition)
    text = f"{name}: {shown.get('State')}, {nodes.usable} usable nodes, MaxTime {shown.get('MaxTime')}"
    yield Finding("ok" if shown.get("State") == "UP" else "problem", "partition", text)
    if schedule.nodes > nodes.there:
        yield Finding("problem", "partition", f"{schedule.nodes} nodes are asked for, {nodes.there} can be had")
    elif schedule.nodes > nodes.usable:
        text = (
            f"{schedule.nodes} nodes are asked for; of {nodes.there}, {nodes.usable} are neither down nor drained now"
        )
        yield Finding("warning", "partition", text)
    most = shown.get("MaxNodes", "UNLIMITED")
    if most.isdigit() and schedule.nodes > int(most):
        yield Finding("problem", "partition", f"{schedule.nodes} nodes are asked for, a job may have {most}")
    limit = limit_s(shown.get("MaxTime", "UNLIMITED"))
    if limit is not None and time_limit.seconds(schedule.time) > limit:
        yield Finding(
            "problem", "partition", f"TIME={schedule.time} is above its MaxTime; fewer SEGMENT_STEPS need less"
        )


def account(submission: Submission) -> Iterator[Finding]:
    """Whether the site's account is one of the user's."""
    wanted, user = submission.site.slurm.account, getpass.getuser()
    query = ("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=user,account")
    try:
        answer = [line.split("|") for line in submission.slurm.run(*query).splitlines()]
        mine = sorted({line[1] for line in answer if len(line) == 2 and line[0] == user})
    except UserError:
        yield Finding("ok", "account", f"{wanted or 'none set'}; this cluster has no accounting to ask")
        return
    if wanted and wanted not in mine:
        yield Finding("problem", "account", f"{wanted!r} is none of {user}'s: {', '.join(mine) or 'there are none'}")
    else:
        yield Finding("ok", "account", wanted or f"Slurm's default of: {', '.join(mine) or 'none'}")


def accepted(submission: Submission) -> Iterator[Finding]:
    """What sbatch itself says to the script: account, QOS, reservation, nodes, GPUs, memory."""
    executor = submission.executor(1, None)
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(executor.script_text())
        file.flush()
        executor.try_out(file.name)
    yield Finding("ok", "sbatch", "accepts the script of a segment (--test-only)")


def image(submission: Submission) -> Iterator[Finding]:
    """Whether the image can be read and fits the hardware."""
    path = submission.site.container.image
    if path is None:
        return
    wrong = [*site_files.image_problems(path)]
    manifest, notes = None, []
    try:
        if not wrong:
            facts = fit.inside(path)
            wrong += [refusal.line for refusal in image_rules.refused(facts, submission.resolved.settings)]
        if not wrong:
            notes = list(image_rules.unknown(facts, submission.resolved.settings))
            processor, manifest = facts.architecture, facts.manifest
            stack = f"stack {manifest.get('stack')}" if manifest else "made without the kit, so not looked into further"
            kind = f"{processor or 'unknown processor'}, {stack}"
    except contents.UnreadableError as error:
        kind = str(error)
    except UserError as error:
        wrong.append(str(error))
    yield from (Finding("problem", "image", problem) for problem in wrong)
    if not wrong:
        yield Finding("ok", "image", f"{path}: {os.path.getsize(path) / 1e9:.1f} GB, {kind}")
    yield from (Finding("warning", "image", note) for note in notes)
    for well, text in patches.lines((manifest or {}).get("patches", [])):
        yield Finding("ok" if well else "warning", "patch", text)


def secrets(submission: Submission) -> Iterator[Finding]:
    """Whether the file with keys is as the batch script wants it."""
    path = submission.site.secrets_file
    if path is None:
        return
    wrong = list(site_files.secrets_problems(path))
    yield from (Finding("problem", "secrets", problem) for problem in wrong)
    if not wrong:
        yield Finding("ok", "secrets", f"{path}: for its owner alone")


def shared(submission: Submission) -> Iterator[Finding]:
    """Whether runs lie where every node can see them."""
    root = _existing(submission.run.path.parent)
    if not os.access(root, os.W_OK):
        yield Finding("problem", "runs", f"{root} cannot be written to")
        return
    kind = _output("stat", "--file-system", "--format=%T", str(root)).strip()
    if submission.site.name == "sandbox":
        yield Finding("ok", "runs", f"{root}; the sandbox's nodes are this machine and see it")
    elif kind in _LOCAL:
        yield Finding("warning", "runs", f"{root} is on {kind}, which other machines do not see")
    else:
        yield Finding("ok", "runs", f"{root} on {kind or 'an unknown file system'}")


def space(submission: Submission) -> Iterator[Finding]:
    """Whether the checkpoints have room."""
    from dsv4kit.plan.counted.checkpoint_size import checkpoint_size
    from dsv4kit.plan.from_settings import question

    settings = submission.resolved.settings
    asked = question(settings)
    where = _existing(Path(settings.checkpoint.directory or submission.run.path))
    free = shutil.disk_usage(where).free
    if asked is None:
        yield Finding("ok", "space", f"{free / _TB:.2f} TB free")
        return
    one = checkpoint_size(asked).size_gb * 1e9
    count = math.ceil(settings.schedule.steps / settings.schedule.save_freq)
    text = f"{free / _TB:.1f} TB free; {count} checkpoints of {one / _TB:.2f} TB are {count * one / _TB:.1f} TB"
    level: Level = "problem" if free < 2 * one else "warning" if free < count * one else "ok"
    yield Finding(level, "space", text)
    if left := quota_left(_output("lfs", "quota", "-q", "-u", getpass.getuser(), str(where))):
        text = f"{left / _TB:.1f} TB left of the quota of {getpass.getuser()}"
        yield Finding("problem" if left < 2 * one else "warning" if left < count * one else "ok", "quota", text)


def rules(submission: Submission) -> Iterator[Finding]:
    """What `submit` would refuse; of the image `image` speaks."""
    for refusal in refusals(submission.case):
        if refusal.key != image_rules.KEY:
            yield Finding("problem", "rules", refusal.line)


def plan(submission: Submission) -> Iterator[Finding]:
    """What the planner says: memory, and the time limit against a segment."""
    verdict = submission.verdict
    if verdict is None:
        return
    level: Level = {"no": "problem", "tight": "warning"}.get(verdict.verdict, "ok")  # type: ignore[assignment]
    yield Finding(level, "plan", "; ".join([verdict.verdict, *verdict.reasons]))
    yield from (Finding("warning", "plan", warning) for warning in verdict.warnings)


_CHECKS: tuple[tuple[str, Callable[[Submission], Iterator[Finding]]], ...] = (
    ("slurm", slurm),
    ("options", options),
    ("partition", partition),
    ("account", account),
    ("sbatch", accepted),
    ("image", image),
    ("secrets", secrets),
    ("runs", shared),
    ("space", space),
    ("rules", rules),
    ("plan", plan),
)


def limit_s(text: str) -> int | None:
    """A limit as Slurm shows it, in seconds; None for none."""
    try:
        return time_limit.seconds(text)
    except ValueError:  # UNLIMITED, INFINITE
        return None


def quota_left(text: str) -> float | None:
    """Bytes left by `lfs quota -q`: its line has path, KiB used, soft and hard limit; a limit of 0 is none."""
    words = text.split()
    numbers = [word.rstrip("*") for word in words[1:4]]
    if len(numbers) < 3 or not all(number.isdigit() for number in numbers):
        return None
    used, soft, hard = map(int, numbers)
    limit = hard or soft
    return (limit - used) * 1024.0 if limit else None


def _existing(path: Path) -> Path:
    """The path, or what of it there is already."""
    return next(part for part in (path, *path.parents) if part.exists())


def _output(*command: str) -> str:
    """What a command prints; nothing where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
