"""Whether an image fits a run: the processor it was built for, and what its manifest says is inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv4kit.config.loading import hardware_of, names
from dsv4kit.config.schema import Hardware, Settings
from dsv4kit.image import contents, record
from dsv4kit.image.manifest import FORMAT


def inside(image: str) -> tuple[str | None, Mapping[str, Any] | None]:
    """(processor, manifest) of an image, from the file itself or else from the record beside it.

    Raises UnreadableError where nothing here can look into the file, and it has no record.
    """
    try:
        return contents.architecture(image), contents.manifest(image)
    except contents.UnreadableError:
        known = record.load(Path(image))
        if known is None:
            raise
        return known.architecture, known.manifest


def verl_of(image: str) -> str | None:
    """Which row of verl_keys/features.yaml the verl in the image is; None where that cannot be known here."""
    try:
        manifest = inside(image)[1]
    except contents.UnreadableError:
        return None
    verl = (manifest or {}).get("features", {}).get("verl")
    return verl if isinstance(verl, str) else None


def problem(image: str, settings: Settings) -> str | None:
    """The first of `problems`; None where there is none, or where nothing here can look into the image."""
    try:
        return next(problems(image, settings), None)
    except contents.UnreadableError:
        return None


def problems(image: str, settings: Settings) -> Iterator[str]:
    """Why the image cannot run this, a line each. Raises UnreadableError where nothing here can look into it.

    Of an image that was made without the kit only the processor is known.
    """
    found, manifest = inside(image)
    hardware, wanted = settings.hardware, settings.hardware.cpu_architecture
    if found and wanted and found != wanted:
        needed = f"an image built for {wanted} is needed"
        yield f"image {image!r}: built for {found}, and {hardware.name} is {wanted}; {needed}"
        return
    if manifest is not None:
        yield from (f"image {image!r}: {line}" for line in manifest_problems(manifest, settings))


def manifest_problems(manifest: Mapping[str, Any], settings: Settings) -> Iterator[str]:
    """What in the manifest does not fit the settings."""
    if manifest.get("format") != FORMAT:
        yield f"its manifest has format {manifest.get('format')}, this kit reads {FORMAT}; build it again"
        return
    built_for, hardware = str(manifest.get("hardware")), settings.hardware
    if not _same_kernels(built_for, hardware):
        yield f"built for HW={built_for}, whose kernels {hardware.name} does not run"
    verl = manifest.get("features", {}).get("verl")
    if verl != settings.engine.verl:
        yield f'its verl is {verl}, the run is set up for {settings.engine.verl}; SET="engine.verl={verl}" goes with it'
    profiles = manifest.get("profiles", [])
    if _same_kernels(built_for, hardware) and built_for == hardware.name and settings.profile not in profiles:
        yield f"it was made for {', '.join(map(str, profiles)) or 'no profile'}; {settings.profile} is none of these"


def _same_kernels(built_for: str, hardware: Hardware) -> bool:
    if built_for == hardware.name:
        return True
    if built_for not in names("hardware"):
        return False
    other = hardware_of(built_for)
    compared = ("device", "cpu_architecture", "sm_architecture")
    return all(getattr(other, name) == getattr(hardware, name) for name in compared)
