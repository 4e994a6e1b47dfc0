"""The bill of materials beside an image: valid, complete, the same for the same image."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import cyclonedx.schema
import jsonschema
import pytest
from referencing import Registry, Resource

from dsv4kit.image import contents, inventory, sbom

SCHEMAS = Path(cyclonedx.schema.__file__).parent / "_res"
KNOWN = {
    "distribution": {"id": "ubuntu", "version": "24.04"},
    "python": [
        {"name": "verl", "version": "0.9.0.dev", "expression": "Apache-2.0"},
        {"name": "odd", "version": "1", "expression": "not ( an expression"},
        {"name": "old", "version": "2", "licence": "BSD License"},
        {"name": "bare", "version": "3"},
    ],
    "system": [{"name": "libnuma1", "version": "2.0.18-1build1", "architecture": "arm64", "source": "numactl"}],
}
MANIFEST = {"git": {"verl": "a" * 40}, "stack_hash": "b" * 64}


def validate(text: str) -> None:
    """Against CycloneDX' own schema, with the licences of SPDX."""
    names = ("bom-1.6", "spdx", "jsf-0.82")
    schemas = {
        f"{name}.SNAPSHOT.schema.json": json.loads((SCHEMAS / f"{name}.SNAPSHOT.schema.json").read_text())
        for name in names
    }
    place = "http://cyclonedx.org/schema/"
    resources = [(place + name, Resource.from_contents(schema)) for name, schema in schemas.items()]
    validator = jsonschema.Draft7Validator(
        schemas["bom-1.6.SNAPSHOT.schema.json"], registry=Registry().with_resources(resources)
    )
    validator.validate(json.loads(text))


def test_it_is_valid_and_names_commits_for_what_came_from_git() -> None:
    text = sbom.document(KNOWN, MANIFEST, "a.sqsh", "c" * 64)
    validate(text)
    found = json.loads(text)
    urls = {each["name"]: each["purl"] for each in found["components"]}
    assert urls == {
        "verl": f"pkg:generic/verl@{'a' * 40}",
        "odd": "pkg:pypi/odd@1",
        "old": "pkg:pypi/old@2",
        "bare": "pkg:pypi/bare@3",
        "libnuma1": "pkg:deb/ubuntu/libnuma1@2.0.18-1build1?arch=arm64&distro=ubuntu-24.04",
    }
    assert found["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": "c" * 64}]
    assert found["serialNumber"] == json.loads(sbom.document(KNOWN, MANIFEST, "a.sqsh", "c" * 64))["serialNumber"]
    assert found["serialNumber"] != json.loads(sbom.document(KNOWN, MANIFEST, "a.sqsh", "d" * 64))["serialNumber"]


def test_a_planted_fault_would_be_seen() -> None:
    found = json.loads(sbom.document(KNOWN, MANIFEST, "a.sqsh", "c" * 64))
    found["components"][0]["type"] = "librarry"
    with pytest.raises(jsonschema.ValidationError):
        validate(json.dumps(found))


def test_this_environment_is_listed_whole() -> None:
    found = inventory.take()
    names = {entry["name"] for entry in found["python"]}
    assert names == {
        name.lower().replace("_", "-").replace(".", "-")
        for name in (installed.metadata["Name"] for installed in importlib.metadata.distributions())
        if name
    }
    assert next(each for each in found["python"] if each["name"] == "cyclonedx-python-lib")["licence"]
    validate(sbom.document(found, {}, "here", "0" * 64))


def test_dpkgs_list_has_a_line_per_package() -> None:
    assert sbom.dpkg_list(KNOWN) == "libnuma1\t2.0.18-1build1\tarm64\n"


def test_both_lie_beside_the_image_and_of_a_foreign_one_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = {"opt/dsv4kit/inventory.json": json.dumps(KNOWN).encode(), "opt/dsv4kit/manifest.json": b"{}"}
    monkeypatch.setattr(contents, "read", lambda image, path: inside.get(path))
    written = sbom.write(tmp_path / "a.sqsh", "c" * 64)
    assert [path.name for path in written] == ["a.sqsh.cdx.json", "a.sqsh.dpkg.txt"]
    validate(written[0].read_text())
    inside.clear()
    assert sbom.write(tmp_path / "b.sqsh", "c" * 64) == []
