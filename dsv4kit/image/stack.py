"""The stacks of `containers/stack.yaml`: everything an image has inside, typed and checked."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from dsv4kit.config.loading import hardware_defaults, load_yaml, validate
from dsv4kit.config.paths import ROOT
from dsv4kit.config.section import Section
from dsv4kit.errors import UserError, nearest
from dsv4kit.image import pins

FILE = ROOT / "containers" / "stack.yaml"
_SHOWN = str(FILE.relative_to(ROOT))

# On the package index these are something else: a web toolkit of 2013, and two empty releases.
NOT_ON_THE_INDEX = ("apex", "deep-ep", "deep-gemm")
# No release of these on the index trains DeepSeek-V4 (0.19.2 has no dsv4_hybrid), so none is ever installed from it.
WITHOUT_V4 = ("megatron-core", "megatron-bridge")

_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[a-z0-9_,-]+\])?\Z")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def canonical(name: str) -> str:
    """A package's name as indexes compare it: `Flash_MLA[x]>1` is `flash-mla`."""
    match = _REQUIREMENT.match(name)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else name


def _matching(pattern: str, what: str) -> Callable[[Any], object]:
    def check(text: str | None) -> str | None:
        if text is not None and not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(what)
        return text

    return check


_sha = _matching(
    r"[0-9a-f]{40}", "a full commit sha has 40 digits of 0-9 and a-f; branches, tags and abbreviations can move"
)
_commit = _matching(r"[0-9a-f]{7,40}", "a commit is 7 to 40 digits of 0-9 and a-f")
_digest = _matching(r"sha256:[0-9a-f]{64}", "a digest is sha256: and 64 digits of 0-9 and a-f")
_version = _matching(r"[0-9][0-9A-Za-z.+!]*", "one exact version")
_url = _matching(r"https://[A-Za-z0-9./_-]+", "an https address of a git repository")
_variable = _matching(r"[A-Z][A-Z0-9_]*_SHA", "a variable's name ends in _SHA")


def _from_index(names: dict[str, Any]) -> dict[str, Any]:
    for name in names:
        if not _NAME.match(name):
            raise ValueError(f"{name!r} is not a package name")
        if canonical(name) in NOT_ON_THE_INDEX:
            raise ValueError(f"{name!r} is something else on the package index; take it from git, at a sha")
        if canonical(name) in WITHOUT_V4 and names[name].role != "dependencies":
            raise ValueError(
                f"{name!r} from the index has no DeepSeek-V4; `role: dependencies`, and a commit under git"
            )
    return names


Role = Literal["install", "compile", "dependencies"]


class Base(Section):
    """The image everything is built on."""

    image: str = Field(description="repository and tag")
    digest: Annotated[str | None, AfterValidator(_digest)] = Field(
        default=None, description="from containers/pins.yaml; none: BASE_IMAGE has to say it"
    )
    reason: str


class Package(Section):
    """One package of the index that is asked for by name."""

    version: Annotated[str, AfterValidator(_version)] = Field(description="exact")
    role: Role = Field(
        default="install",
        description="`compile`: an sdist, compiled in the image; `dependencies`: only what it asks for",
    )
    reason: str


class Submodule(Section):
    """A repository inside another one's, at the commit that one records for it."""

    url: Annotated[str, AfterValidator(_url)]
    sha: Annotated[str, AfterValidator(_sha)]
    tree: Annotated[str | None, AfterValidator(_sha)] = None


class GitSource(Section):
    """One package that is built from a commit."""

    url: Annotated[str, AfterValidator(_url)]
    sha: Annotated[str | None, AfterValidator(_sha)] = None
    variable: Annotated[str | None, AfterValidator(_variable)] = Field(
        default=None, description="build variable that has to give the sha, where it is not known here"
    )
    contains: list[Annotated[str, AfterValidator(_commit)]] = Field(
        default=[], description="commits it has to descend from"
    )
    tree: Annotated[str | None, AfterValidator(_sha)] = Field(
        default=None,
        description="what `git write-tree` says of the commit's files without those of submodules: checks a tarball,"
        " which has no commit; null: not known here, and only git itself can be asked for it",
    )
    submodules: dict[str, Submodule] = Field(default={}, description="by path: fetched too")
    role: Literal["install", "compile"]
    reason: str
    recorded: str | None = Field(default=None, description="of a `variable`: the commit in containers/pins.yaml")

    def rules(self) -> Iterator[tuple[str, str]]:
        """A commit that is known, or one that is asked for."""
        if (self.sha is None) == (self.variable is None):
            yield "sha", "either a full commit sha, or the `variable` it has to be given in"


class Fetched(NamedTuple):
    """One repository that a build needs: a source, or the submodule `path` of one.

    `name` is that of its directory in the build's context, `variable` the one that may name another place for it.
    """

    name: str
    url: str
    sha: str | None
    tree: str | None
    variable: str
    of: str
    path: str = ""


class Import(Section):
    """One thing that has to be importable in the image."""

    driver: bool = Field(default=False, description="may need a GPU's driver already when it is imported")
    early: bool = Field(default=False, description="nothing compiled in the image is behind it: tried before that, too")
    reason: str


class Stack(Section):
    """Everything inside one kind of image."""

    name: str
    description: str
    recipe: Literal["grpo", "sft"] = Field(description="what it is for")
    hardware: list[str]
    python: Literal["3.10", "3.11", "3.12"]
    verl: str = Field(description="row of verl_keys/features.yaml that the verl inside has to show")
    base: Base
    system_site_packages: bool = Field(default=False, description="the base's Python packages stay visible")
    system: dict[str, str] = Field(description="distribution package: why")
    locks: list[str] = Field(default=[], description="locks made by hand, in this order; none: one per architecture")
    index: Annotated[dict[str, Package], AfterValidator(_from_index)] = Field(default={})
    overrides: dict[str, str] = Field(default={}, description="requirement that stands for all on its package: why")
    caps: dict[str, str] = Field(default={}, description="bound on what nothing asks for by name: why")
    never: dict[str, str] = Field(default={}, description="package kept out of the lock: why")
    compile_with: list[str] = Field(
        default=[],
        description="packages (`nvidia-*` stands for all that begin so) that are there when kernels are compiled; a new"
        " version of any other compiles nothing again",
    )
    metadata: dict[str, list[str]] = Field(default={}, description="sdist: what its own metadata would ask for")
    git: dict[str, GitSource] = Field(default={})
    imports: dict[str, Import]

    def rules(self) -> Iterator[tuple[str, str]]:
        """One way of locking; nothing that is pinned twice."""
        if bool(self.locks) == bool(self.index):
            yield "index", "either packages of the index, or `locks` made by hand"
        for name in sorted({canonical(name) for name in self.never} & {canonical(name) for name in self.index}):
            yield "never", f"{name} is asked for under `index`"

    @property
    def repositories(self) -> dict[str, Fetched]:
        """Every repository by the variable that may name a mirror, a checkout or a tarball of it."""
        found = []
        for name, source in self.git.items():
            found.append(Fetched(name, source.url, source.sha, source.tree, place(name), name))
            for path, inner in source.submodules.items():
                both = f"{name}-{path.rpartition('/')[2]}"
                found.append(Fetched(both, inner.url, inner.sha, inner.tree, place(both), name, path))
        return {each.variable: each for each in found}

    @property
    def variables(self) -> dict[str, GitSource]:
        """What has to be given for a build: commits that are not known here."""
        return {source.variable: source for source in self.git.values() if source.variable}


def place(name: str) -> str:
    """The variable that may name another place for a repository."""
    return f"{re.sub(r'[^A-Za-z0-9]', '_', name).upper()}_SOURCE"


@functools.cache
def stacks() -> dict[str, Stack]:
    """All stacks by name. Raises UserError for what is wrong in the file, in one line."""
    found, known = {}, pins.recorded()
    for name, tree in load_yaml(FILE).items():
        if not isinstance(tree, dict):
            raise UserError(f"{_SHOWN}: {name}: expected keys and values")
        tree = pins.fill(str(name), tree, known.get(str(name), {}))
        sources = dict.fromkeys([*tree, *Stack.model_fields], f"{_SHOWN}: {name}")
        found[str(name)] = validate(Stack, {**tree, "name": str(name)}, sources)
    return found


def stack_of(hardware: str, recipe: str) -> Stack | None:
    """The stack for that hardware and recipe."""
    return next((s for s in stacks().values() if hardware in s.hardware and s.recipe == recipe), None)


def stack_for(hardware: str, name: str | None = None) -> Stack:
    """The stack of that name, or the one for what the hardware trains by default."""
    recipe = hardware_defaults(hardware).get("recipe")
    fitting = {key: stack for key, stack in stacks().items() if hardware in stack.hardware}
    if name is None:
        for stack in fitting.values():
            if stack.recipe == recipe:
                return stack
        raise UserError(f"{_SHOWN}: no stack for hardware {hardware} and recipe {recipe}, its default")
    if name not in fitting:
        known = ", ".join(fitting)
        raise UserError(
            f"STACK={name!r}: no stack of that name for HW={hardware}; allowed: {known}{nearest(name, fitting)}"
        )
    return fitting[name]
