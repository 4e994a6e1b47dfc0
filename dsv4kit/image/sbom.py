"""What an image is made of, beside its squashfs: `<file>.cdx.json` (CycloneDX 1.6) and `<file>.dpkg.txt`.

CycloneDX is written by its own library. The image lists what it has (`image.inventory`), because only its package
managers know; a scanner such as syft would be one more program to fetch, and guesses from files what these two know.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv4kit.image import contents, inventory
from dsv4kit.run.files import write_text

_PLACE = f"{contents.MANIFEST.rpartition('/')[0]}/{inventory.NAME}"


def names(image: Path) -> tuple[Path, Path]:
    """Where the two files are: CycloneDX, and dpkg's list."""
    return image.with_name(f"{image.name}.cdx.json"), image.with_name(f"{image.name}.dpkg.txt")


def write(image: Path, digest: str) -> list[Path]:
    """Writes both beside the image, whose SHA-256 is `digest`; none where the image has no list of what it has."""
    materials, listing = names(image)
    found = contents.read(str(image), _PLACE)
    if found is None:
        return []
    known = json.loads(found)
    write_text(materials, document(known, contents.manifest(str(image)) or {}, image.name, digest))
    write_text(listing, dpkg_list(known))
    return [materials, listing]


def dpkg_list(known: Mapping[str, Any]) -> str:
    """A line per package of the distribution: name, version, architecture."""
    rows = ((entry["name"], entry["version"], entry["architecture"]) for entry in known["system"])
    return "".join("\t".join(row) + "\n" for row in rows)


def document(known: Mapping[str, Any], manifest: Mapping[str, Any], name: str, digest: str) -> str:
    """The bill of materials as JSON; `known` as `inventory.take` makes it. One image always has one serial number."""
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6

    about = Component(
        type=ComponentType.CONTAINER,
        name=name,
        version=str(manifest.get("stack_hash", "")) or None,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        bom_ref=name,
    )
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, digest))
    bom.metadata.component = about
    components = list(_components(known, manifest))
    bom.components.update(components)
    bom.register_dependency(about, components)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def _components(known: Mapping[str, Any], manifest: Mapping[str, Any]) -> Iterator[Any]:
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    commits = manifest.get("git", {})
    for entry in known["python"]:
        url = PackageURL("pypi", name=entry["name"], version=entry["version"])
        if commit := commits.get(entry["name"]):
            # Not the index's release of that version, but a commit.
            url = PackageURL("generic", name=entry["name"], version=commit)
        yield Component(
            type=ComponentType.LIBRARY,
            name=entry["name"],
            version=entry["version"],
            purl=url,
            bom_ref=str(url),
            licenses=list(_licences(entry)),
        )
    distribution = known["distribution"]
    for entry in known["system"]:
        qualifiers = {"arch": entry["architecture"], "distro": f"{distribution['id']}-{distribution['version']}"}
        url = PackageURL("deb", distribution["id"], entry["name"], entry["version"], qualifiers)
        yield Component(
            type=ComponentType.LIBRARY, name=entry["name"], version=entry["version"], purl=url, bom_ref=str(url)
        )


def _licences(entry: Mapping[str, str]) -> Iterator[Any]:
    from cyclonedx.contrib.license.exceptions import LicenseFactoryException
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model.license import LicenseAcknowledgement

    factory, declared = LicenseFactory(), LicenseAcknowledgement.DECLARED
    if expression := entry.get("expression"):
        try:
            yield factory.make_with_expression(expression, acknowledgement=declared)
        except LicenseFactoryException:  # no expression after all
            yield factory.make_with_name(expression, acknowledgement=declared)
    elif named := entry.get("licence"):
        yield factory.make_from_string(named, license_acknowledgement=declared)
