"""From an image in an engine to a squashfs on disk: by enroot where it is installed, else by our own writer."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4kit import packages
from dsv4kit.errors import UserError
from dsv4kit.image import contents, record, sbom, squashfs
from dsv4kit.image.engine import Engine, remove_tree
from dsv4kit.image.progress import Progress, run_logged
from dsv4kit.image.record import Record


def to_file(
    engine: Engine, image: str, out: Path, architecture: str | None, log: Path, progress: Progress, **known: Any
) -> Record:
    """Writes the image to `out`, with its record; `known` are further fields of that.

    The file appears at once and whole; whatever fails leaves nothing of it. Raises UserError, among others for an image
    that was built for another processor than `architecture`.
    """
    packages.require(squashfs.PROGRAMS, "making a squashfs")
    config = engine.config(image)
    check_architecture(image, config.architecture, architecture)
    by_enroot = engine.scheme is not None and shutil.which("enroot") is not None
    with _temporary_file(out) as temporary:
        if by_enroot:
            progress("squashfs: enroot import")
            _by_enroot(engine, image, temporary, log, progress)
            _check_whole(temporary, log)
        else:
            with engine.files(image) as root:
                progress("squashfs: packing")
                squashfs.prepare(root, config, image)
                squashfs.write(root, temporary)
        inside = contents.architecture(str(temporary))
        if inside is not None:
            check_architecture(image, inside, architecture)
        progress("squashfs: checksum")
        for old in sbom.names(out):
            old.unlink(missing_ok=True)
        made = record.put(
            temporary,
            out,
            source=image,
            architecture=config.architecture,
            written_by="enroot" if by_enroot else "mksquashfs",
            manifest=contents.manifest(str(temporary)),
            **known,
        )
    sbom.write(out, made.sha256)
    return made


def check_writable(out: Path) -> None:
    """Refuses a file that could not be written, before an hour goes into it."""
    directory = next(part for part in out.parents if part.exists())
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise UserError(f"IMAGE={str(out)!r}: {directory} cannot be written to")


def check_architecture(image: str, found: str, wanted: str | None) -> None:
    """Refuses an image for another processor: enroot would only warn, and every node fail."""
    if wanted is not None and found != wanted:
        raise UserError(f"{image}: built for {found}, {wanted} is needed")


@contextlib.contextmanager
def _temporary_file(out: Path) -> Iterator[Path]:
    """A name beside `out`, so that giving the file its own name is one rename; nothing is there under it afterwards."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for old in out.parent.glob(f".{out.name}.*.part"):  # of an import that was killed; one at a time is running
            old.unlink()
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None
    temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _by_enroot(engine: Engine, image: str, out: Path, log: Path, progress: Progress) -> None:
    """`enroot import`; it unpacks the whole image into its temporary path, by default /tmp, which is often small."""
    engine.directory.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="enroot-", dir=engine.directory))
    before = set(_enroots(engine))
    env = {
        **engine.env,
        "ENROOT_SQUASH_OPTIONS": " ".join(squashfs.OPTIONS),
        "ENROOT_TEMP_PATH": os.environ.get("ENROOT_TEMP_PATH") or str(temporary),
    }
    if engine.program != "docker":
        # With podman too it removes its container with `docker rm`: without that the import ends with status 1, and
        # the container stays.
        (temporary / "bin").mkdir()
        (temporary / "bin" / "docker").symlink_to(str(shutil.which(engine.program)))
        env["PATH"] = f"{temporary / 'bin'}:{env.get('PATH', packages.SYSTEM_PATH)}"
    try:
        run_logged(["enroot", "import", "-o", str(out), f"{engine.scheme}{image}"], log, progress, env, "enroot import")
    finally:
        for name in set(_enroots(engine)) - before:
            engine.run("rm", name, check=False)
        remove_tree(temporary)


def _enroots(engine: Engine) -> list[str]:
    return [name for name in engine.containers() if name.startswith("enroot.")]


def _check_whole(image: Path, log: Path) -> None:
    """enroot's exit status says less than the file: its own list of what is in it has to be readable."""
    done = subprocess.run(["unsquashfs", "-ls", str(image), "etc"], capture_output=True)
    if done.returncode != 0 or not image.stat().st_size:
        raise UserError(f"enroot import wrote no whole squashfs (all of its output: {log})")
