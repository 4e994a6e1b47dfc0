"""What a run on the sandbox needs besides a profile: a cluster, an environment to train in, and the toy model."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4kit import hints, packages
from dsv4kit.config.paths import ROOT
from dsv4kit.errors import UserError

if TYPE_CHECKING:
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.launch.submission import Submission

# What enters an image where there is no pyxis.
IMAGE_PROGRAMS = {"bwrap": "bubblewrap", "unsquashfs": "squashfs-tools"}


def on_sandbox(submission: Submission, torch_index: str | None, install: bool) -> Submission:
    """`submission` with the sandbox's Slurm, model and data, and (outside of an image) its Python.

    `install` puts in place whatever is missing; without it (a dry run) nothing is touched.
    """
    from dsv4kit.feasibility import site_files
    from dsv4kit.launch import mounts
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.sandbox import runtime
    from dsv4kit.sandbox.cluster import Sandbox, SandboxSpec
    from dsv4kit.sandbox.host import require_root

    running = Sandbox.load()
    spec = running.spec if running else SandboxSpec()
    nodes = submission.resolved.settings.schedule.nodes
    if nodes > spec.nodes:
        raise UserError(
            f"NODES={nodes}: the sandbox has {spec.nodes} nodes; `{hints.command('sandbox down')}`, then"
            f" `{hints.command(f'sandbox up --nodes {nodes}')}`"
        )
    script = _script(submission)
    if not install:
        return _for_show(submission, script)
    require_root()
    image = submission.site.container.image
    if image is None:
        environment = runtime.runtime_python(torch_index=torch_index)
        assets = runtime.assets_dir(environment, script=script)
        python, programs = str(environment), environment.parents[1]
    else:
        for problem in site_files.image_problems(image):
            raise UserError(problem)
        packages.require(IMAGE_PROGRAMS, "running in an image on this machine")
        python, programs, assets = submission.python, Path(image).parent, _assets_by(image, submission.python, script)
    submission.run.path.parent.mkdir(parents=True, exist_ok=True)
    if running is None:
        print(f"sandbox: starting Slurm with {spec.nodes} nodes on this machine", flush=True)
    named = map(Path, mounts.read_only(submission.resolved.settings))
    shared = [submission.run.path.parent, programs, assets, *named, *_checkouts(submission)]
    running = Sandbox.up(spec, share=shared)
    return _with(submission, Slurm(running.client_env), python, assets)


def _script(submission: Submission) -> Path:
    """What makes the model: a true DeepSeek-V4 where Megatron comes from checkouts, else the toy of the main job."""
    from dsv4kit.sandbox import runtime

    return runtime.MAKE_DSV4 if submission.resolved.settings.model.checkouts else runtime.MAKE_ASSETS


def _checkouts(submission: Submission) -> list[Path]:
    """Directories the trainer imports from, which the sandbox's nodes have to see."""
    settings = submission.resolved.settings
    names = ("DSV4KIT_MEGATRON_LM", "DSV4KIT_MEGATRON_BRIDGE") if settings.model.checkouts else ()
    return [Path(settings.env[name]) for name in names]


def _for_show(submission: Submission, script: Path) -> Submission:
    """For a dry run: paths of what is installed; what is not installed yet has a placeholder path that says so."""
    from dsv4kit.cli.runs import sandbox_slurm
    from dsv4kit.config.cache import cache_dir
    from dsv4kit.sandbox import runtime

    slurm = sandbox_slurm()
    missing = cache_dir() / "not-installed-yet"
    if submission.site.container.image is not None:
        return _with(submission, slurm, submission.python, missing)
    try:
        python = runtime.runtime_python(install=False)
    except UserError:
        return _with(submission, slurm, str(missing / "bin" / "python"), missing)
    return _with(submission, slurm, str(python), runtime.assets_dir(python, script=script))


def _with(submission: Submission, slurm: Slurm, python: str, assets: Path) -> Submission:
    """The submission with these; what runs in an image sees the assets, read-only."""
    site, container = submission.site, submission.site.container
    if container.image is not None:
        mounts = [*container.mounts, f"{assets}:{assets}:ro"]
        site = site.model_copy(update={"container": container.model_copy(update={"mounts": mounts})})
    return dataclasses.replace(
        submission, site=site, slurm=slurm, python=python, model_path=str(assets / "model"), data_dir=str(assets)
    )


def _assets_by(image: str, python: str, script: Path) -> Path:
    """The toy model and data, made by the Python of the image."""
    from dsv4kit.sandbox import runtime

    def within(writable: Path) -> list[str]:
        scripts, enter = runtime.MAKE_ASSETS.parent, ROOT / "dsv4kit" / "node" / "enter_image.sh"
        mounts = [f"{scripts}:{scripts}:ro", f"{writable}:{writable}"]
        return ["bash", str(enter), image, empty, str(writable), "ro", "/", *mounts, "--"]

    with tempfile.TemporaryDirectory() as empty:
        return runtime.assets_dir(python, within, script)
