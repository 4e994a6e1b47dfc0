"""`image build` on a cluster with pyxis and enroot alone: a job builds in a container that is saved as the squashfs."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.config.loading import hardware_of
from dsv4kit.config.site import Site
from dsv4kit.errors import UserError
from dsv4kit.image import building, contents, host_settings, importing, record, script, space, squashfs
from dsv4kit.image.building import BuildRequest, Built
from dsv4kit.image.context import BuildContext, write_stack
from dsv4kit.image.engine import remove_tree
from dsv4kit.image.progress import Progress, reason, step_of
from dsv4kit.image.stack import Stack, stack_for
from dsv4kit.launch.slurm import ENDED, JobState, Slurm, submitted_job
from dsv4kit.run.files import GrowingFile, write_json, write_text
from dsv4kit.templates import environment

# Compiling for one processor takes an hour and more; fetching 15 GB of packages and saving 20 GB come on top.
TIME = "6:00:00"
_POLL_S = 2.0
_SILENCE_S = 60.0
_NEWS_S = 30.0


@dataclass(frozen=True)
class Job:
    """One build on its way: where it is noted, and what Slurm calls it."""

    directory: Path
    job_id: str
    out: Path

    @property
    def part(self) -> Path:
        """What pyxis writes; the squashfs has its own name once it is whole."""
        return self.out.with_name(f".{self.out.name}.job.part")


def make(request: BuildRequest, site: Site, time_limit: str, slurm: Slurm, progress: Progress) -> Built:
    """Builds by a job of the site. One that is on its way for the same image is shown, not submitted again.

    Every failure is a UserError. Whoever stops watching (Ctrl-C, a closed terminal) leaves the job to go on.
    """
    stack = stack_for(request.hardware, request.variables.get("STACK") or None)
    _require_all(request, stack, site, slurm)
    building.directory().mkdir(parents=True, exist_ok=True)
    variables = {**request.variables, **_base_file(request)}
    machine = hardware_of(request.hardware)
    with building.context_of(stack, machine, variables) as context:
        out = (request.out or building.default_path(context)).absolute()
        if found := building.reusable(out, context):
            return Built(out, found, reused=True)
        importing.check_writable(out)

        def write(directory: Path) -> BuildContext:
            return write_stack(stack, machine, directory, variables)

        job = _going_on(context, out, slurm) or _submit(context, write, out, site, time_limit, slurm, progress)
    _wait(job, slurm, progress)
    return Built(out, _finish(job, context, progress), reused=False)


def _require_all(request: BuildRequest, stack: Stack, site: Site, slurm: Slurm) -> None:
    """Everything that is missing, at once."""
    missing = []
    if site.container.runtime != "pyxis":
        missing.append(
            f"SITE={site.name}: container.runtime is {site.container.runtime}; building by a job takes pyxis"
        )
    try:
        known = slurm.run("srun", "--help")
        lacking = [name for name in ("--container-image", "--container-save") if name not in known]
        if lacking:
            missing.append(f"srun has no {' and no '.join(lacking)}: pyxis is not installed here")
        slurm.run("sbatch", "--version")
    except UserError as error:
        missing.append(str(error))
    if not request.variables.get("BASE_IMAGE") and stack.base.digest is None:
        missing.append(f"BASE_IMAGE is not set: {stack.base.image}@sha256:..., or a squashfs of it by its path")
    for name, source in stack.variables.items():
        if not request.variables.get(name):
            missing.append(f"{name} is not set: the full sha of a commit of {source.url}")
    if request.engine is not None:
        missing.append(f"ENGINE={request.engine}: with SITE the job's own pyxis builds")
    if missing:
        raise UserError("image build: " + "; ".join(missing))


def _base_file(request: BuildRequest) -> dict[str, str]:
    """A base that is a squashfs, with its sum for a digest."""
    base = request.variables.get("BASE_IMAGE", "")
    if not base.startswith("/") or "@" in base:
        return {}
    if not os.path.isfile(base):
        raise UserError(f"BASE_IMAGE={base!r}: no such file")
    return {"BASE_IMAGE": f"{base}@sha256:{record.sha256(Path(base))}"}


def base_uri(image: str) -> str:
    """A base as pyxis takes it. A digest in the tag's place is what every enroot since 2020 understands."""
    name, _, digest = image.partition("@")
    if name.startswith("/"):
        return name
    if digest:
        path, _, last = name.rpartition("/")
        name = "/".join(filter(None, [path, last.partition(":")[0]])) + f":{digest}"
    first, slash, rest = name.partition("/")
    if slash and re.search(r"[.:]", first):
        return f"docker://{first}#{rest}"
    return f"docker://{name}"


def _directory(context: BuildContext) -> Path:
    return building.directory() / f"job-{context.hardware}-{context.stack_hash[:12]}"


def _going_on(context: BuildContext, out: Path, slurm: Slurm) -> Job | None:
    """The job of an earlier call for this image, where it is not over or has done its work."""
    directory = _directory(context)
    try:
        noted = json.loads((directory / "job.json").read_text(encoding="utf-8"))
        job = Job(directory, str(noted["job_id"]), Path(noted["out"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    state = slurm.states([job.job_id]).get(job.job_id)
    alive = state is not None and state.state not in ENDED
    if not alive and not _proved(job):
        return None
    if job.out != out:
        raise UserError(f"image build: job {job.job_id} builds it as {job.out}; IMAGE={job.out} shows it")
    return job


def _proved(job: Job) -> bool:
    return _status(job) == "0" and job.part.exists()


def _status(job: Job) -> str | None:
    """What the batch script ended with; None where it has not said so (yet)."""
    try:
        return (job.directory / "result" / "ended").read_text().strip()
    except OSError:
        return None


def _submit(
    context: BuildContext,
    write: Callable[[Path], BuildContext],
    out: Path,
    site: Site,
    time_limit: str,
    slurm: Slurm,
    progress: Progress,
) -> Job:
    machine = hardware_of(context.hardware)
    space.require({out.parent: space.needs(machine.device)[1]})
    out.parent.mkdir(parents=True, exist_ok=True)
    directory = _directory(context)
    remove_tree(directory)
    (directory / "result").mkdir(parents=True)
    os.chmod(directory, 0o700)
    inside = write(directory / "context")
    arguments = {name: value for name, value in inside.build_args.items() if value}
    text = script.render(
        inside.dockerfile.read_text(encoding="utf-8"),
        arguments,
        inside.architecture,
        f"The image of {inside.hardware}, stack {inside.stack}, {inside.stack_hash[:12]}.",
        inside.tag,
    )
    write_text(directory / "context" / "build.sh", text)
    job = Job(directory, "", out)
    job.part.unlink(missing_ok=True)
    batch = directory / "image.sbatch"
    scratch_gb = math.ceil(space.scratch(machine.device))
    # What this machine needs to reach package indexes, for the build alone.
    mounts = host_settings.mounts(directory / "host", os.environ)
    write_text(batch, batch_script(inside, job, site, time_limit, scratch_gb, mounts))
    # A file in place of --export=NAMES, for which slurmd would run a login shell on the node.
    variables_file = directory / "environment"
    write_text(variables_file, "".join(f"{key}={value}\0" for key, value in slurm.job_environment.items()))
    said = slurm.run("sbatch", "--parsable", f"--export-file={variables_file}", str(batch))
    try:
        job = Job(directory, submitted_job(said), out)
    except ValueError as error:
        raise UserError(f"sbatch: {error}") from None
    write_json(directory / "job.json", {"job_id": job.job_id, "out": str(out)})
    progress(f"job {job.job_id} builds {context.tag}; all output goes to {directory / 'job.log'}")
    return job


def batch_script(
    context: BuildContext, job: Job, site: Site, time_limit: str, scratch_gb: int, mounts: list[str]
) -> str:
    """The job's script."""
    return (
        environment()
        .get_template("image.sbatch.j2")
        .render(
            tag=context.tag,
            architecture=context.architecture,
            job_name=f"dsv4kit-image-{context.stack_hash[:12]}",
            job_dir=str(job.directory),
            part=str(job.part),
            slurm=site.slurm,
            cpus=site.slurm.cpus_per_task or hardware_of(context.hardware).cpus_per_node,
            time=time_limit,
            env=site.env,
            scratch_dir=site.scratch_dir,
            scratch_gb=scratch_gb,
            squash_options=" ".join(squashfs.OPTIONS),
            base=base_uri(context.base_image),
            mounts=mounts,
        )
    )


def _wait(job: Job, slurm: Slurm, progress: Progress) -> None:
    """Until the job is over, its steps told. Raises UserError with its last words where it failed."""
    log = GrowingFile(job.directory / "job.log")
    words: list[str] = []
    shown, step, told = "", "", time.monotonic()
    try:
        while True:
            try:
                state = slurm.states([job.job_id]).get(job.job_id)
                over = state is None or state.state in ENDED
            except UserError as error:  # a controller that is being started again
                over, state = False, JobState("unknown", str(error))
            now = f"job {job.job_id}: {state.state.lower()} {state.reason}" if state else ""
            if now and now != shown and not over:
                shown = now
                progress(now)
            for line in _lines(log):
                words = [*words[-40:], line]
                if begun := step_of(line):
                    step, told = begun, time.monotonic()
                    progress(f"build {step}")
                elif "dsv4kit: the image is proved" in line:
                    step, told = "", time.monotonic()
                    progress("proved; pyxis saves it as a squashfs")
            if over:
                break
            if time.monotonic() - told >= _SILENCE_S and state and state.state == "RUNNING":
                told = time.monotonic()
                progress(f"still at it: {step or 'fetching the base, or saving'}")
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        progress(f"job {job.job_id} goes on; the same command shows it again, scancel {job.job_id} ends it")
        raise
    # A node writes over a network file system, whose news may take a while.
    deadline = time.monotonic() + _NEWS_S
    while _status(job) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    words += list(_lines(log))
    if not _proved(job):
        where = f" at step {step}" if step else ""
        ended = f", Slurm says {state.state}" if state else ""
        raise UserError(
            f"image build: job {job.job_id} failed{where}{ended}: {reason(words)}"
            f" (all of its output: {job.directory / 'job.log'})"
        )


def _lines(log: GrowingFile) -> Iterator[str]:
    for line in log.new_lines():
        if text := line.decode(errors="replace").rstrip():
            yield text


def _finish(job: Job, context: BuildContext, progress: Progress) -> record.Record:
    """The squashfs under its own name, with its record."""
    progress("squashfs: checksum")
    manifest = json.loads((job.directory / "result" / "manifest.json").read_text(encoding="utf-8"))
    if not contents.is_manifest(manifest):
        raise UserError(f"image build: {job.directory / 'result' / 'manifest.json'} is damaged")
    made = record.put(
        job.part,
        job.out,
        source=context.tag,
        architecture=context.architecture,
        written_by="pyxis",
        manifest=manifest,
        stack_hash=context.stack_hash,
        hardware=context.hardware,
    )
    shutil.copyfile(job.directory / "job.log", building.directory() / "build.log")
    remove_tree(job.directory)
    return made
