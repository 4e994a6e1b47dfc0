"""Whether an image fits a run: the processor it was built for, and what its manifest says is inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsv4kit.config.loading import hardware_of, names
from dsv4kit.config.schema import Hardware, Settings
from dsv4kit.feasibility import image_needs
from dsv4kit.feasibility.case import Case, ImageFacts, Refusal
from dsv4kit.plugin.found import PackageFacts, clashes

KEY = "container.image"


def fits(case: Case) -> Iterator[Refusal]:
    """Of an image that nothing here can look into nothing is known."""
    if case.image is not None:
        yield from refused(case.image, case.settings)


def refused(image: ImageFacts, settings: Settings) -> Iterator[Refusal]:
    """Why the image cannot run this. Of one that was made without the kit only the processor is known."""
    hardware, wanted = settings.hardware, settings.hardware.cpu_architecture
    said = f"image {image.path!r}"
    if image.architecture and wanted and image.architecture != wanted:
        why = f"built for {image.architecture}, and {hardware.name} is {wanted}"
        yield Refusal(KEY, image.path, said, why, f"an image built for {wanted} is needed")
        return
    if image.manifest is not None:
        for why in _manifest(image.manifest, image.readable_format, settings):
            yield Refusal(KEY, image.path, said, why)


def _manifest(manifest: Mapping[str, Any], readable_format: int, settings: Settings) -> Iterator[str]:
    """What in the manifest does not fit the settings."""
    if manifest.get("format") != readable_format:
        yield f"its manifest has format {manifest.get('format')}, this kit reads {readable_format}; build it again"
        return
    built_for, hardware = str(manifest.get("hardware")), settings.hardware
    if not _same_kernels(built_for, hardware):
        yield f"built for HW={built_for}, whose kernels {hardware.name} does not run"
    verl = manifest.get("features", {}).get("verl")
    if verl != settings.engine.verl:
        yield f'its verl is {verl}, the run is set up for {settings.engine.verl}; SET="engine.verl={verl}" goes with it'
    profiles = manifest.get("profiles", [])
    if _same_kernels(built_for, hardware) and built_for == hardware.name and settings.profile not in profiles:
        made_for = ", ".join(map(str, profiles)) or "no profile"
        yield f"it was built for {made_for}, and not for {settings.profile}"
    for row in manifest.get("needs", ()):
        if (row["model"], row["recipe"]) == (settings.model.name, settings.recipe.name) and row["missing"]:
            yield f"it cannot run {settings.recipe.name} of {settings.model.name}: {'; '.join(row['missing'][:3])}"
    if facts := manifest.get("facts"):
        known = PackageFacts(**{key: value for key, value in facts.items() if key in PackageFacts._fields})
        # Of the kernels the settings' own rules speak, with the setting's name.
        rollout = {key: value for key, value in image_needs.asked(settings).items() if key == "data_parallel"}
        yield from clashes(known, rollout)


def unknown(image: ImageFacts | None, settings: Settings) -> Iterator[str]:
    """What a run needs of its image and nothing here can tell: notes for a person, no refusals."""
    if not image_needs.asked(settings):
        return
    manifest = (image.manifest if image else None) or {}
    if "needs" not in manifest:
        yield (
            f"what the image has is not known here: each node looks before a segment whether it can run"
            f" {settings.recipe.name} of {settings.model.name}, and `doctor NODES=2` does so now"
        )
    if settings.optimizer.cpu_offload and not manifest.get("features", {}).get("contains", {}).get("verl"):
        yield (
            "verl #8235 (resume of an offloaded optimizer) cannot be told from verl's source: main from 0bd668c on"
            " has it, no release up to 0.9.1 does; an image that the kit builds has the commit checked"
        )


def _same_kernels(built_for: str, hardware: Hardware) -> bool:
    if built_for == hardware.name:
        return True
    if built_for not in names("hardware"):
        return False
    other = hardware_of(built_for)
    compared = ("device", "cpu_architecture", "sm_architecture")
    return all(getattr(other, name) == getattr(hardware, name) for name in compared)
