"""From names and overrides to one checked `Settings` tree, with the source of every value.

A profile is merged from general to particular: recipe, model, what its table shares with others (`bases:`), hardware,
the table of model x recipe (what all hardware has in common, then the hardware's row).
`bases:` in any of these files names files merged below it: one in config/bases/, or `kind/name` (`models/dsv4-pro`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import ValidationError

from dsv4kit import yaml_text
from dsv4kit.config.paths import HERE, ROOT, SITES
from dsv4kit.config.schema import Geometry, Hardware, Settings
from dsv4kit.config.section import Section, problem
from dsv4kit.config.tree import Tree, assign, merge
from dsv4kit.errors import UserError, nearest

if TYPE_CHECKING:
    from dsv4kit.config.site import Site

S = TypeVar("S", bound=Section)


class _Machine(Section):
    """What every file of a hardware has to say."""

    hardware: Hardware


class _Shaped(Section):
    """Of a model's file, what it looks like."""

    geometry: Geometry | None = None


# Keys of the files that are not settings.
_NOT_SETTINGS = ("defaults", "bases")


class Override(NamedTuple):
    """One value of the user's: a dotted settings key, the value, and what it was written as (`STEPS=16`)."""

    key: str
    value: Any
    source: str


class Resolved(NamedTuple):
    """A resolved profile; `sources` maps each dotted key to the file or variable its value came from."""

    settings: Settings
    sources: Mapping[str, str]


def names(kind: str) -> list[str]:
    """Names of the YAML files of one kind: hardware, models, recipes, profiles or sites."""
    directory = SITES if kind == "sites" else HERE / kind
    return sorted(path.stem for path in directory.glob("*.yaml"))


def load_yaml(path: Path) -> Tree:
    """One YAML mapping; a user error names file and line of what is wrong."""
    try:
        content = yaml_text.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not valid YAML: not UTF-8") from None
    except yaml_text.YamlError as error:
        raise UserError(f"{path}{f':{error.line}' if error.line else ''}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys and values, found {type(content).__name__}")
    return content


def find(kind: str, name: str, variable: str) -> Path:
    """The YAML file of that name; `variable` is what the user called it (HW, MODEL, ...)."""
    known = names(kind)
    if name not in known:
        raise UserError(f"{variable}={name!r}: no such name; known: {', '.join(known)}{nearest(name, known)}")
    return (SITES if kind == "sites" else HERE / kind) / f"{name}.yaml"


def load_site(name: str) -> Site:
    """The site of that name, or from the file where `name` is a path to a YAML file."""
    from dsv4kit.config.site import Site

    path = Path(name) if name.endswith((".yaml", ".yml")) else find("sites", name, "SITE")
    if not path.exists():
        raise UserError(f"SITE={name!r}: no such file; there are examples in {SITES}")
    tree = load_yaml(path)
    return validate(Site, tree, dict.fromkeys([*_dotted(tree), *Site.model_fields], _shown(path)))


class Table(NamedTuple):
    """One file of config/profiles: model x recipe, and per hardware what differs from the rest of the file."""

    path: Path
    model: str
    recipe: str
    shared: Tree
    rows: Mapping[str, Tree]

    def name(self, hardware: str) -> str:
        """The profile's name."""
        return f"{self.path.stem}-{hardware}"


def combinations() -> dict[str, dict[str, str]]:
    """Profile name -> hardware, model and recipe it is for, sorted by name."""
    tables = (_table(HERE / "profiles" / f"{name}.yaml") for name in names("profiles"))
    found = [
        (table.name(hardware), {"hardware": hardware, "model": table.model, "recipe": table.recipe})
        for table in tables
        for hardware in table.rows
    ]
    return dict(sorted(found))


def _table(path: Path) -> Table:
    tree = load_yaml(path)
    chosen, rows = tree.pop("for", None), tree.pop("hardware", None)
    if not isinstance(chosen, Mapping) or not all(isinstance(chosen.get(key), str) for key in ("model", "recipe")):
        raise UserError(f"{_shown(path)}: for={chosen!r}: names of model and recipe are needed")
    if not isinstance(rows, Mapping) or not all(isinstance(row, Mapping | None) for row in rows.values()):
        raise UserError(f"{_shown(path)}: hardware={rows!r}: a table is needed, hardware: what differs on it")
    known = names("hardware")
    for name in rows:
        if name not in known:
            near = nearest(str(name), known)
            raise UserError(f"{_shown(path)}: hardware.{name}: no such hardware; known: {', '.join(known)}{near}")
    return Table(path, chosen["model"], chosen["recipe"], tree, {name: row or {} for name, row in rows.items()})


def hardware_defaults(hardware: str) -> dict[str, str]:
    """Model, recipe and site that go with a hardware where the user names none."""
    path = find("hardware", hardware, "HW")
    defaults = load_yaml(path).get("defaults", {})
    if not isinstance(defaults, Mapping) or not all(isinstance(name, str) for name in defaults.values()):
        raise UserError(f"{_shown(path)}: defaults={defaults!r}: names of model, recipe and site may stand there")
    return dict(defaults)


def hardware_of(name: str) -> Hardware:
    """The hardware of that name, as its file describes it."""
    path = find("hardware", name, "HW")
    tree = load_yaml(path)
    machine = {"hardware": tree.get("hardware")}
    return validate(_Machine, machine, dict.fromkeys(["hardware", *_dotted(machine)], _shown(path))).hardware


def geometry_of(model: str) -> Geometry | None:
    """The shape of a model by its name; None where its file has none."""
    tree: Tree = {}
    sources: dict[str, str] = {}
    for path, layer in _with_bases(find("models", model, "MODEL")).items():
        tree = merge(tree, {"geometry": layer.get("model", {}).get("geometry", {})}, _shown(path), sources)
    return validate(_Shaped, tree, sources).geometry if tree.get("geometry") else None


def load_settings(hardware: str, model: str, recipe: str, overrides: Sequence[Override] = ()) -> Resolved:
    """The profile for hardware x model x recipe with the user's overrides on top, checked."""
    below = [find("recipes", recipe, "RECIPE"), find("models", model, "MODEL")]
    machine = find("hardware", hardware, "HW")
    table = _table_for(hardware, model, recipe)
    layers: dict[str, Tree] = {}
    for path in [*below, *_bases(table.path, table.shared), machine]:
        layers |= {_shown(file): layer for file, layer in _with_bases(path).items()}
    layers[_shown(table.path)] = {"profile": table.name(hardware), **table.shared}
    layers[f"{_shown(table.path)}: hardware.{hardware}"] = table.rows[hardware]
    tree: Tree = {}
    sources: dict[str, str] = {}
    for source, layer in layers.items():
        own = {key: value for key, value in layer.items() if key not in _NOT_SETTINGS}
        tree = merge(tree, own, source, sources)
    for override in overrides:
        tree = assign(tree, override.key, override.value, override.source, sources)
    settings = validate(Settings, tree, sources)
    if not settings.description:
        settings = settings.model_copy(update={"description": _description(settings)})
    return Resolved(settings, sources)


def _description(settings: Settings) -> str:
    """A profile in words."""
    machine, nodes = settings.hardware, settings.schedule.nodes
    gpus = "without GPUs" if machine.device == "cpu" else f"of {machine.gpus_per_node} {machine.name.upper()}"
    where = f"{nodes} node{'s' if nodes > 1 else ''} {gpus}"
    return f"{settings.recipe.name.upper()} of {settings.model.name} on {where}"


def _bases(path: Path, content: Tree) -> list[Path]:
    """Files that `content`, which stands in `path`, is based on."""
    bases = content.get("bases", [])
    if not isinstance(bases, list) or not all(isinstance(name, str) for name in bases):
        raise UserError(f"{_shown(path)}: bases={bases!r}: a list of names is needed")
    split = (name.rpartition("/") for name in bases)
    return [HERE / (kind or "bases") / f"{stem}.yaml" for kind, _, stem in split]


def _with_bases(path: Path, above: tuple[Path, ...] = ()) -> dict[Path, Tree]:
    """The file and all its bases, most general first, each once."""
    if path in above:
        raise UserError(f"{_shown(path)}: is a base of itself")
    content = load_yaml(path)
    layers: dict[Path, Tree] = {}
    for base in _bases(path, content):
        layers |= _with_bases(base, (*above, path))
    return {**layers, path: content}


def _table_for(hardware: str, model: str, recipe: str) -> Table:
    """The one table for model and recipe, if it has a row for the hardware."""
    for name in names("profiles"):
        path = HERE / "profiles" / f"{name}.yaml"
        text = path.read_text(encoding="utf-8")
        # Most files are told apart by this, in a tenth of the time.
        if all(word in text for word in (hardware, model, recipe)):
            table = _table(path)
            if (table.model, table.recipe) == (model, recipe) and hardware in table.rows:
                return table
    known = combinations()
    there = "; ".join(" ".join(c.values()) for c in known.values() if c["hardware"] == hardware)
    raise UserError(f"no profile for HW={hardware} MODEL={model} RECIPE={recipe}; HW={hardware} has: {there}")


def _shown(path: Path) -> str:
    """The path as a user of the clone sees it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in tree.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            keys += _dotted(value, f"{prefix}{key}.")
    return keys


def validate(section: type[S], tree: Tree, sources: Mapping[str, str]) -> S:
    """The section from the tree; the first problem becomes one line naming source, key, value and what is allowed."""
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        found = problem(section, error)
    dotted = ".".join(str(part) for part in found.location)
    value = f"={found.value!r}" if found.kind == "value" else ""
    raise UserError(f"{source_of(dotted, sources) or section.__name__}: {dotted}{value}: {found.message}")


def source_of(dotted: str, sources: Mapping[str, str]) -> str | None:
    """Where the value of a key came from: the key itself, or the nearest that is written, below or above it."""
    below = (source for key, source in sources.items() if key.startswith(f"{dotted}."))
    above = (source for key, source in sources.items() if dotted.startswith(f"{key}."))
    return sources.get(dotted) or next(below, None) or next(above, None)
