"""JSON Schemas of the settings files: they hold for every file there is, and refuse what the kit refuses."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

from dsv4kit.cli import main
from dsv4kit.config import json_schema, reference
from dsv4kit.config.loading import load_yaml
from dsv4kit.config.paths import HERE, ROOT, SITES
from dsv4kit.config.schema import Settings
from dsv4kit.config.section import Section
from dsv4kit.config.site import Site
from dsv4kit.errors import UserError

DIRECTORIES = {
    "site": SITES,
    "hardware": HERE / "hardware",
    "profile": HERE / "profiles",
    "model": HERE / "models",
    "recipe": HERE / "recipes",
}
FILES = [(kind, path) for kind, directory in DIRECTORIES.items() for path in sorted(directory.glob("*.yaml"))]
VALIDATORS = {kind: jsonschema.Draft202012Validator(json_schema.of(kind)) for kind in json_schema.KINDS}


def mistakes(kind: str, tree: Any) -> list[str]:
    return [error.message for error in VALIDATORS[kind].iter_errors(tree)]


@pytest.mark.parametrize(("kind", "path"), FILES, ids=[f"{kind}-{path.stem}" for kind, path in FILES])
def test_every_file_there_is_holds_to_its_schema(kind: str, path: Path) -> None:
    assert mistakes(kind, load_yaml(path)) == []


@pytest.mark.parametrize("kind", json_schema.KINDS)
def test_it_is_a_json_schema_and_the_command_prints_it(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["schema", kind]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed == json_schema.of(kind)


@pytest.mark.parametrize(
    ("kind", "name", "change", "said"),
    [
        ("site", "example-bare", {"scratch_dirr": "/tmp"}, "scratch_dirr"),
        ("site", "example-bare", {"slurm": {"gpu_option": "gpus", "grace_s": 1, "requeue": True}}, "gpus"),
        ("hardware", "h100", {"hardware": {"gpus_per_node": 0}}, "0"),
        ("hardware", "h100", {"defaults": {"modell": "x"}}, "modell"),
        ("profile", "pro-grpo", {"hardware": {"h100": {"rollout": {"nn": 1}}}}, "h100|nn"),
        ("profile", "pro-grpo", {"hardware": {"h10": {}}}, "h10"),
        ("profile", "pro-grpo", {"for": {"model": "dsv4-pro"}}, "recipe"),
        ("model", "tiny", {"model": {"nam": "x"}}, "nam"),
        ("recipe", "sft", {"recipe": {"launcher": "mpirun"}}, "mpirun"),
    ],
)
def test_what_the_kit_refuses_is_refused(kind: str, name: str, change: dict[str, Any], said: str) -> None:
    found = mistakes(kind, load_yaml(DIRECTORIES[kind] / f"{name}.yaml") | change)
    assert any(re.search(said, message) for message in found), found


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"known: site, hardware, .*\(did you mean 'profile'\?\)"):
        main.run(["schema", "profil"])


@pytest.mark.parametrize("name", [path.stem for path in SITES.glob("example-*.yaml")])
def test_the_first_line_of_an_example_names_the_schema(name: str) -> None:
    first = (SITES / f"{name}.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=site.schema.json"


def test_the_reference_of_all_settings_is_up_to_date() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == reference.render(), "python -m dsv4kit.config.reference > docs/settings.md"
    for key in ("parallel.actor.pipeline_parallel_size", "slurm.gpu_option", "schedule.segment_steps"):
        assert f"| `{key}` |" in page


def sections(annotation: Any) -> set[type[Section]]:
    """The sections in an annotation, and all below them."""
    if not (isinstance(annotation, type) and issubclass(annotation, Section)):
        return {section for part in get_args(annotation) for section in sections(part)}
    below = (sections(field.annotation) for field in annotation.model_fields.values())
    return {annotation}.union(*below)


def test_every_setting_is_read_by_somebody() -> None:
    read: set[str] = set()
    for path in (ROOT / "dsv4kit").rglob("*.py"):
        if path != HERE / "schema.py":
            for node in ast.walk(ast.parse(path.read_text())):
                read |= {node.attr} if isinstance(node, ast.Attribute) else set()
                # By getattr, or as a key of the geometry the planner takes.
                read |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
    read |= set(re.findall(r"[a-z_]+", (ROOT / "templates" / "segment.sbatch.j2").read_text()))
    found = sections(Settings) | sections(Site)
    assert len(found) > 20
    for section in found:
        assert section.model_fields.keys() <= read, section
