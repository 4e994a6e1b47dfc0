"""The end of an image's build: imports, drivers, sources; one that is bad gets no manifest."""

import json
import os
from pathlib import Path

import pytest

from dsv4kit.image import manifest, patches

# As the dynamic linker says it.
NO_CUDA = "libcuda.so.1: cannot open shared object file: No such file or directory"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """`module(code)`: makes `planted`, which runs that code when it is imported."""

    def make(code: str) -> None:
        (tmp_path / "planted.py").write_text(code)

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return make


def test_what_is_there_works() -> None:
    assert manifest.try_import("json:loads", False) == manifest.Imported("works")


def test_what_is_missing_fails_whether_or_not_a_driver_is(module) -> None:  # type: ignore[no-untyped-def]
    assert manifest.try_import("not_there_at_all", True).how == "fails"
    module("x = 1")
    missing = manifest.try_import("planted:y", True)
    assert (missing.how, "has no attribute 'y'" in missing.said) == ("fails", True)


def test_a_missing_driver_is_told_only_where_it_may_be_missing(module) -> None:  # type: ignore[no-untyped-def]
    module(f"raise ImportError({NO_CUDA!r})")
    assert manifest.try_import("planted", True) == manifest.Imported("needs a driver", f"ImportError: {NO_CUDA}")
    assert manifest.try_import("planted", False).how == "fails"


def test_another_error_behind_the_missing_driver_is_a_defect(module, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    stub = tmp_path / "libcuda.so"
    stub.touch()
    planted = (
        "import os\n"
        "paths = os.environ.get('LD_LIBRARY_PATH', '').split(':')\n"
        "found = [p for p in paths if p and os.path.exists(os.path.join(p, 'libcuda.so.1'))]\n"
        f"if not found: raise ImportError({NO_CUDA!r})\n"
    )
    module(planted)
    assert manifest.try_import("planted", True, stub).how == "works with a stub of the driver"
    module(planted + "raise ImportError('undefined symbol: _ZN3c10')\n")
    tried = manifest.try_import("planted", True, stub)
    assert (tried.how, "undefined symbol" in tried.said) == ("fails", True)
    assert not any("libcuda" in name for name in os.listdir(tmp_path) if name != "libcuda.so")


def test_a_package_that_loads_its_parts_late_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lazy" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "lazy" / "__init__.py").touch()
    (package / "kernel.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert manifest.try_import("lazy.*", False).how == "works"
    (package / "kernel.py").write_text("import not_there_at_all")
    assert manifest.try_import("lazy", False).how == "works"
    assert "not_there_at_all" in manifest.try_import("lazy.*", False).said


def test_torch_comes_first_where_there_is_one(module) -> None:  # type: ignore[no-untyped-def]
    """The planted torch stands in for the real one, which this Python does not have."""
    module("import sys; assert 'torch' in sys.modules")
    assert manifest.try_import("planted", False).how == "fails"
    (Path(os.environ["PYTHONPATH"]) / "torch.py").touch()
    assert manifest.try_import("planted", False).how == "works"


def test_replicas_of_grpo_have_several_ranks_so_a_verl_without_8234_is_asked_about() -> None:
    assert manifest._asked({"recipe": "grpo", "device": "cuda"}) == {"data_parallel": 2}
    assert manifest._asked({"recipe": "sft", "device": "cuda"}) == {}
    assert manifest._asked({"recipe": "grpo", "device": "cpu"}) == {}


def test_what_is_known_before_compiling_ends_the_build_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(manifest, "examine_early", lambda _: ["dsv4-pro, grpo: no module vllm.models.deepseek_v4"])
    assert manifest.main(["--early", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "dsv4kit: dsv4-pro, grpo: no module vllm.models.deepseek_v4\n"


def test_a_crash_is_a_failure(module) -> None:  # type: ignore[no-untyped-def]
    module("import os; os.abort()")
    assert manifest.try_import("planted", True).how == "fails"


def test_other_sources_than_asked_for_are_named() -> None:
    facts = {"git": {"verl": "a" * 40, "flash-mla": "b" * 40}}
    assert manifest.sha_problems(facts, {"verl": "a" * 40, "flash-mla": "b" * 40}) == []
    assert manifest.sha_problems(facts, {"verl": "c" * 40}) == [
        f"verl: built from {'c' * 40}, asked for {'a' * 40}",
        f"flash-mla: built from None, asked for {'b' * 40}",
    ]


def test_no_manifest_is_written_where_something_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"imports": {"torch": "fails"}, "packages": {}, "profiles": []}
    monkeypatch.setattr(manifest, "examine", lambda _: (content, ["import torch: no"]))
    assert manifest.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == "dsv4kit: import torch: no\n"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(manifest, "examine", lambda _: (content, []))
    assert manifest.main([str(tmp_path)]) == 0
    assert json.loads((tmp_path / "manifest.json").read_text()) == content


def test_packages_are_listed_by_the_name_an_index_compares() -> None:
    found = manifest.packages()
    assert {"hydra-core", "types-pyyaml", "jinja2"} <= found.keys()
    assert list(found) == sorted(found)


def test_a_required_patch_that_does_not_fit_is_a_defect_of_the_image() -> None:
    rows = [
        {"patch": "a", "required": True, "state": "failed", "detail": "it was renamed"},
        {"patch": "b", "required": False, "state": "failed", "detail": "x"},
        {"patch": "c", "required": True, "state": "applied", "detail": ""},
    ]
    assert list(patches.problems(rows)) == ["patch 'a': it was renamed"]


def test_without_megatron_there_is_nothing_to_patch() -> None:
    assert patches.outcomes() == []
