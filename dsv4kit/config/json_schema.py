"""JSON Schemas of the kit's settings files: editors complete and check a file by them."""

from __future__ import annotations

from typing import Any

from dsv4kit.config.loading import names
from dsv4kit.config.schema import Settings
from dsv4kit.config.site import Site
from dsv4kit.config.tree import Tree

KINDS = ("site", "hardware", "profile", "model", "recipe")

_NAMES: Tree = {"type": "array", "items": {"type": "string"}}
_BASES: Tree = {**_NAMES, "description": "files merged below this one: a name in config/bases, or kind/name"}


def of(kind: str) -> Tree:
    """The schema of one kind of file, one of KINDS.

    A site file is complete. The others each hold a part of a run's settings, so that nothing is required but what
    makes the kind; whether a merged profile is complete is checked when it is resolved.
    """
    if kind == "site":
        return _headed(kind, Site.model_json_schema())
    schema = _optional(Settings.model_json_schema())
    sections = schema["properties"]
    if kind == "profile":
        schema["$defs"]["Settings"] = {key: value for key, value in schema.items() if key != "$defs"}
        row = {"anyOf": [{"$ref": "#/$defs/Settings"}, {"type": "null"}]}
        own: Tree = {
            "for": _closed("the model and the recipe these profiles are for", ("model", "recipe"), required=True),
            "hardware": {
                "type": "object",
                "description": "hardware: what differs on it from the rest of this file",
                "properties": dict.fromkeys(names("hardware"), row),
                "additionalProperties": False,
            },
        }
        required = ["for", "hardware"]
    else:
        own, required = {}, [kind]
    if kind == "hardware":
        own["defaults"] = _closed("what goes with it where the user names nothing else", ("model", "recipe", "site"))
    return _headed(kind, {**schema, "properties": {**sections, **own, "bases": _BASES}, "required": required})


def _headed(kind: str, schema: Tree) -> Tree:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": f"dsv4kit {kind} file"}


def _closed(description: str, keys: tuple[str, ...], required: bool = False) -> Tree:
    properties = {key: {"type": "string"} for key in keys}
    closed: Tree = {"type": "object", "description": description, "properties": properties}
    return {**closed, "additionalProperties": False, **({"required": list(keys)} if required else {})}


def _optional(schema: Any) -> Any:
    """The schema with no key required in any section."""
    if isinstance(schema, dict):
        kept = ((key, value) for key, value in schema.items() if key != "required" or not isinstance(value, list))
        return {key: _optional(value) for key, value in kept}
    return [_optional(item) for item in schema] if isinstance(schema, list) else schema
