"""The reference of all settings, generated: `python -m dsv4kit.config.reference > docs/settings.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dsv4kit.config.schema import Settings
from dsv4kit.config.site import Site

_HEAD = """# Settings

All keys of the settings files, generated from the schema (`python -m dsv4kit.config.reference > docs/settings.md`).
`SET=key=value` sets one of a run's settings for one run; a site's are set in its file. `dsv4kit schema KIND` prints the
same as a JSON Schema, for editors.
"""

_KINDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
    "object": "names and values",
}


def render() -> str:
    """The page."""
    parts = [_HEAD, "## A run's settings\n", *_sections(Settings.model_json_schema())]
    return "\n".join([*parts, "## A site\n", *_sections(Site.model_json_schema())])


def _sections(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """One table per section, those within it after it."""
    defs, inner, rows = schema.get("$defs", {}), [], []
    for key, field in schema["properties"].items():
        section = _section(field, defs)
        if section is not None:
            inner.append((f"{prefix}{key}.", section))
            continue
        default = _code(field["default"]) if "default" in field else "" if key in schema.get("required", ()) else "-"
        description = field.get("description", "").replace("|", r"\|")
        rows.append(f"| `{prefix}{key}` | {_takes(field, defs)} | {default} | {description} |")
    if rows:
        head = f"### `{prefix[:-1]}`\n\n{schema['description']}\n" if prefix else ""
        yield "\n".join([*filter(None, [head]), "| key | takes | default | |", "|---|---|---|---|", *rows, ""])
    for below, section in inner:
        yield from _sections({**section, "$defs": defs}, below)


def _section(field: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any] | None:
    """What a field that is a section refers to."""
    for choice in (field, *field.get("anyOf", ()), *field.get("allOf", ())):
        if "$ref" in choice:
            found: dict[str, Any] = defs[choice["$ref"].rpartition("/")[2]]
            return found
    return None


def _takes(field: dict[str, Any], defs: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_takes(choice, defs) for choice in field["anyOf"])
    if "enum" in field or "const" in field:
        return ", ".join(_code(choice) for choice in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of: {_takes(field.get('items', {}), defs)}"
    kind = _KINDS.get(field.get("type", ""), "any value")
    bounds = [
        f"{word} {field[name]:g}"
        for word, name in (("above", "exclusiveMinimum"), ("from", "minimum"), ("up to", "maximum"))
        if name in field and not (name == "maximum" and field[name] >= 1_000_000_000)
    ]
    return " ".join([kind, *bounds])


def _code(value: Any) -> str:
    """As YAML has it."""
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


if __name__ == "__main__":
    print(render(), end="")
