"""The import hook and the registry of patches, on modules made up here."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dsv4kit.plugin import patching
from dsv4kit.plugin.patching import Patch, PatchError, PatchResult, Registry, State, attribute, marked, original_of

CALLS: list[str] = []


def patch_it(module: ModuleType) -> PatchResult:
    CALLS.append(module.__name__)
    module.value = "patched"  # type: ignore[attr-defined]
    return PatchResult(State.APPLIED, "done")


def not_needed(_module: ModuleType) -> PatchResult:
    return PatchResult(State.NOT_NEEDED, "upstream has it")


def refuse(module: ModuleType) -> PatchResult:
    attribute(module, "gone")
    raise AssertionError("attribute() raises")


@pytest.fixture(autouse=True)
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "toypackage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "target.py").write_text("value = 'original'\n")
    (package / "other.py").write_text("from toypackage.target import value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    CALLS.clear()
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith("toypackage")]:
        del sys.modules[name]


def _patch(function: str = "patch_it", required: bool = True, target: str = "toypackage.target") -> Patch:
    return Patch("toy", target, f"{__name__}:{function}", required, "TOY_SWITCH")


def test_applied_when_the_target_is_imported_and_before_anyone_binds_its_names() -> None:
    registry = Registry()
    registry.add(_patch())
    assert "toypackage" not in sys.modules
    assert registry.report()[0]["state"] == "pending"
    assert importlib.import_module("toypackage.other").value == "patched"
    assert CALLS == ["toypackage.target"]
    assert registry.report() == [
        {
            "patch": "toy",
            "target": "toypackage.target",
            "required": True,
            "state": "applied",
            "detail": "done",
            "switch": "TOY_SWITCH",
        }
    ]


def test_applied_at_once_to_a_module_that_is_there() -> None:
    module = importlib.import_module("toypackage.target")
    Registry().add(_patch())
    assert module.value == "patched"


def test_applied_once_however_often_it_is_added_or_the_module_reloaded() -> None:
    registry = Registry()
    registry.add(_patch())
    registry.add(_patch())
    importlib.import_module("toypackage.target")
    registry.add(_patch())
    importlib.import_module("toypackage.target")
    assert CALLS == ["toypackage.target"]
    assert len(registry.report()) == 1


def test_the_module_is_otherwise_as_it_would_be() -> None:
    Registry().add(_patch())
    module = importlib.import_module("toypackage.target")
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    import inspect

    assert inspect.getsource(module) == "value = 'original'\n"


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_SWITCH", "0")
    registry = Registry()
    registry.add(_patch())
    assert importlib.import_module("toypackage.target").value == "original"
    assert registry.report()[0]["state"] == "switched off"


def test_inert_when_upstream_is_fixed() -> None:
    registry = Registry()
    registry.add(_patch("not_needed"))
    assert importlib.import_module("toypackage.target").value == "original"
    assert registry.report()[0]["detail"] == "upstream has it"


def test_a_required_patch_that_does_not_fit_stops_the_import_each_time() -> None:
    registry = Registry()
    registry.add(_patch("refuse"))
    for _ in range(2):
        with pytest.raises(
            PatchError, match=r"'toy' does not fit the installed toypackage.target.*'gone'.*TOY_SWITCH=0"
        ):
            importlib.import_module("toypackage.target")
    assert "toypackage.target" not in sys.modules
    assert registry.report()[0]["state"] == "failed"
    assert not issubclass(PatchError, ImportError)


def test_an_optional_patch_that_does_not_fit_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    registry.add(_patch("refuse", required=False))
    assert importlib.import_module("toypackage.target").value == "original"
    assert registry.report()[0]["state"] == "failed"
    assert "does not fit" in caplog.text


def test_settle_decides_what_no_one_imported() -> None:
    registry = Registry()
    registry.add(_patch(target="toypackage.moved"))
    importlib.import_module("toypackage")
    registry.settle("elsewhere")
    assert registry.report()[0]["state"] == "pending"
    with pytest.raises(PatchError, match=r"toypackage\.moved: it cannot be imported"):
        registry.settle("toypackage")


def test_settle_tries_all_before_it_raises() -> None:
    registry = Registry()
    registry.add(_patch(target="toypackage.moved"))
    second = _patch()
    second.name = "second"
    registry.add(second)
    with pytest.raises(PatchError):
        registry.settle()
    assert [row["state"] for row in registry.report()] == ["failed", "applied"]


def test_too_late_is_said() -> None:
    module = importlib.import_module("toypackage.target")
    assert module.__spec__ is not None
    module.__spec__._initializing = True  # type: ignore[attr-defined]
    with pytest.raises(PatchError, match="too late"):
        Registry().add(_patch())


def test_what_replaces_what_is_known() -> None:
    def original() -> None: ...

    def replacement() -> None: ...

    assert original_of(original) is None
    assert original_of(marked(replacement, original)) is original
    assert original_of(classmethod(replacement)) is original


def test_the_entry_module_imports_nothing_heavy() -> None:
    code = (
        "import sys; import dsv4kit.plugin.dsv4 as d;"
        "d.install(); from dsv4kit.plugin.patching import REGISTRY;"
        "names = [row['patch'] for row in REGISTRY.report()]; assert len(names) == len(set(names)) == 15, names;"
        "heavy = {'torch', 'megatron', 'verl', 'ray', 'pydantic', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(patching.__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr


def test_without_the_packages_every_patch_is_listed_as_failed() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "dsv4kit.plugin.dsv4"],
        capture_output=True,
        text=True,
        cwd=Path(patching.__file__).parents[2],
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.count('"state": "failed"') == len(done.stdout.splitlines()) == 15
