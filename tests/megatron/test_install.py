"""The entry module in processes of its own: nothing heavy early, everything in place when the engine is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from warm_python import WarmPython

HERE = Path(__file__).parent
# On the version of the lock file every patch is needed; a checkout (environment.py) may have mended some.
PINNED = metadata.version("megatron-core") == "0.19.2" and not os.environ.get("DSV4KIT_MEGATRON_LM")
Run = Callable[..., subprocess.CompletedProcess[str]]

_WITHOUT_TRITON = f"import sys; sys.path.insert(0, {str(HERE)!r}); import conftest; "
_ENGINE = _WITHOUT_TRITON + (
    "import verl, json; "
    "heavy = [m for m in ('megatron.core', 'vllm', 'transformer_engine') if m in sys.modules]; "
    "import verl.workers.engine.megatron.transformer_impl; "
    "from dsv4kit.plugin.patching import REGISTRY; "
    "print(json.dumps([heavy, REGISTRY.report()]))"
)


@pytest.fixture(scope="module")
def python() -> Iterator[Run]:
    with WarmPython(sys.executable) as warm:

        def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
            return warm.run(code, env={"VERL_USE_EXTERNAL_MODULES": "dsv4kit.plugin.dsv4", **environment})

        yield run


def test_every_patch_is_decided_before_an_optimizer_can_be_built(python: Run) -> None:
    done = python(_ENGINE)
    assert done.returncode == 0, done.stderr[-2000:]
    heavy, rows = json.loads(done.stdout.splitlines()[-1])
    assert heavy == []
    states = {row["patch"]: row["state"] for row in rows}
    assert states.pop("MTP tolerates extra arguments") in ("not needed", "pending")
    assert set(states.values()) == {"applied"} if PINNED else set(states.values()) <= {"applied", "not needed"}
    assert len(states) == 14
    bound = next(row["detail"] for row in rows if row["patch"] == "gradient norm per dtype")
    assert bound == "bound in megatron.core.optimizer.clip_grads"


def test_the_switch_of_upstream_turns_a_and_b_off(python: Run) -> None:
    done = python(_ENGINE, VERL_MEGATRON_OPTIMIZER_COMPAT="0", DSV4KIT_FIDELITY="0")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])[1]
    off = {row["patch"] for row in rows if row["state"] == "switched off"}
    assert len(off) == 7
    assert {"no-grad main parameters", "gradient norm per dtype", "gradient clipping per dtype"} <= off


@pytest.mark.parametrize("how", ["renamed", "removed"])
def test_a_changed_megatron_stops_the_process(python: Run, how: str) -> None:
    change = {
        "renamed": "import megatron.core.optimizer.clip_grads as c; del c.get_grad_norm_fp32; ",
        "removed": "sys.modules['megatron.core.optimizer.clip_grads_gone'] = None; ",
    }[how]
    rename = "import dsv4kit.plugin.patching as p; " + (
        "p.REGISTRY._patches['gradient norm per dtype'].target += '_gone'; " if how == "removed" else ""
    )
    engine = "import verl; import verl.workers.engine.megatron.transformer_impl"
    # Changed before the plugin comes.
    if how == "renamed":
        code = _WITHOUT_TRITON + change + engine
    else:
        code = _WITHOUT_TRITON + "import dsv4kit.plugin.dsv4; " + rename + change + engine
    done = python(code)
    assert done.returncode != 0
    assert "PatchError: dsv4kit: the patch 'gradient norm per dtype' does not fit" in done.stderr
    assert "VERL_MEGATRON_OPTIMIZER_COMPAT=0 switches it off" in done.stderr


def test_the_build_of_an_image_writes_down_what_every_patch_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsv4kit.image import patches

    (tmp_path / "sitecustomize.py").write_text(f"import gc; gc.set_threshold(50_000); {_WITHOUT_TRITON}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    rows = patches.outcomes()
    assert len(rows) == 15
    assert list(patches.problems(rows)) == []
