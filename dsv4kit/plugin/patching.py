"""Late patching: a patch is applied the moment its target module has been imported, and not before.

verl imports the modules of `VERL_USE_EXTERNAL_MODULES` while it is itself being imported, in the driver and in every
worker. Importing Megatron there would be slow, and wrong in processes that never use it. So a patch names its target
module, and an import hook calls it as soon as someone imports that module. Standard library only.

Nothing fails silently: every patch ends in a state that `REGISTRY.report()` lists, and one that is required and cannot
be applied raises out of the import that needed it.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)

_MARK = "_dsv4kit_patch"


class PatchError(RuntimeError):
    """A required patch could not be applied.

    No ImportError: verl turns those into the warning that an engine "is not available".
    """


class State(enum.Enum):
    """What became of a patch in this process."""

    PENDING = "pending"
    """Its target has not been imported yet."""
    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    """Upstream has the fix already."""
    SWITCHED_OFF = "switched off"
    FAILED = "failed"


@dataclass(frozen=True)
class PatchResult:
    """What a patch function did, for the report."""

    state: State
    detail: str = ""


@dataclass
class Patch:
    """A change to one module.

    `function` is "module:name" and is imported only when the target is: it takes the target module, returns an
    `PatchResult`, and raises when the target is not what it expects.
    """

    name: str
    target: str
    function: str
    required: bool
    switch: str
    """The environment variable that switches the patch off when it is "0"."""
    state: State = State.PENDING
    detail: str = ""

    def run(self, module: ModuleType) -> None:
        """Applies the patch to its imported target; once."""
        if self.state is State.FAILED:
            # A second import of the same target: the answer stays the same.
            self.fail(self.detail)
        if self.state is not State.PENDING:
            return
        if os.environ.get(self.switch, "1").strip() == "0":
            self.state, self.detail = State.SWITCHED_OFF, f"{self.switch}=0"
            return
        try:
            where, _, name = self.function.partition(":")
            outcome: PatchResult = getattr(importlib.import_module(where), name)(module)
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}", error)
            return
        self.state, self.detail = outcome.state, outcome.detail
        _log.info("dsv4kit patch %r on %s: %s %s", self.name, self.target, self.state.value, self.detail)

    def fail(self, why: str, cause: Exception | None = None) -> None:
        """Records that the patch is impossible; raises when it is required."""
        self.state, self.detail = State.FAILED, why
        message = (
            f"dsv4kit: the patch {self.name!r} does not fit the installed {self.target}: {why}. "
            f"Training without it is not safe; {self.switch}=0 switches it off."
        )
        # Also logged: whoever imports the target may swallow the exception.
        _log.error(message)
        if self.required:
            raise PatchError(message) from cause


class Registry:
    """The patches of this process, and the import hook that applies them."""

    def __init__(self) -> None:
        self._patches: dict[str, Patch] = {}
        self._finder = _Finder(self)

    def add(self, patch: Patch) -> None:
        """Applies the patch now if its target is imported, else when it will be. A known name is ignored."""
        if patch.name in self._patches:
            return
        self._patches[patch.name] = patch
        module = sys.modules.get(patch.target)
        if module is None:
            if self._finder not in sys.meta_path:
                sys.meta_path.insert(0, self._finder)
        elif getattr(getattr(module, "__spec__", None), "_initializing", False):
            patch.fail("it is being imported at this moment, so the plugin came too late")
        else:
            patch.run(module)

    def waiting_for(self, target: str) -> list[Patch]:
        """The patches that have a say in the import of this module."""
        undecided = (State.PENDING, State.FAILED)
        return [p for p in self._patches.values() if p.target == target and p.state in undecided]

    def imported(self, module: ModuleType) -> None:
        """Called when a target has been executed."""
        for patch in self.waiting_for(module.__name__):
            patch.run(module)

    def settle(self, package: str | None = None) -> None:
        """Imports the targets still waited for, of one package or of all, so that no patch stays undecided.

        A target that does not exist makes its patch fail. All are tried before the first failure is raised.
        """
        first: PatchError | None = None
        for patch in list(self._patches.values()):
            if patch.state is not State.PENDING or not (package is None or patch.target.startswith(package + ".")):
                continue
            try:
                try:
                    importlib.import_module(patch.target)
                except ImportError as error:
                    patch.fail(f"it cannot be imported ({error})", error)
            except PatchError as error:
                first = first or error
        if first is not None:
            raise first

    def report(self) -> list[dict[str, Any]]:
        """One row per patch: what `dsv4kit doctor` shows."""
        return [
            {
                "patch": p.name,
                "target": p.target,
                "required": p.required,
                "state": p.state.value,
                "detail": p.detail,
                "switch": p.switch,
            }
            for p in self._patches.values()
        ]


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a target, and adds a call after its execution."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self._registry.waiting_for(fullname):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                self._call_after(spec)
                return spec  # type: ignore[no-any-return]
        return None

    def _call_after(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Replaces `exec_module` of this module's own loader, whose type stays: `inspect` and others ask for it."""
        loader = spec.loader
        if loader is None:
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._registry.imported(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]


REGISTRY = Registry()


def attribute(owner: Any, name: str) -> Any:
    """`owner.name` as it was defined (a classmethod stays one); says what is missing when it is."""
    found = vars(owner).get(name)
    if found is None:
        raise PatchError(f"{getattr(owner, '__name__', owner)!s} has no {name!r} (upstream renamed or removed it)")
    return found


def marked(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Marks `function` as the kit's replacement of `original`."""
    setattr(function, _MARK, original)
    return function


def original_of(function: Any) -> Any:
    """What the kit's replacement replaced; None for anything else."""
    return getattr(getattr(function, "__func__", function), _MARK, None)


def modules_under(package: str) -> Iterator[ModuleType]:
    """The modules of a package that are imported at this moment."""
    for name, module in list(sys.modules.items()):
        if module is not None and (name == package or name.startswith(package + ".")):
            yield module
