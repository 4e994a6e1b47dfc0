"""What torch really compiled in one segment is used, not compiled again, by a process of the next one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from warm_python import WarmPython

from dsv4kit.node.kernel_cache import KernelCache
from dsv4kit.node.scratch import Scratch
from dsv4kit.run.node_spec import KernelCaches

COMPILE = """
import json, time
import torch
from torch._dynamo.utils import counters

@torch.compile
def entropy(logits):
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

since = time.perf_counter()
entropy(torch.zeros(8, 64))
found = counters["inductor"]
print(json.dumps({"compiled": found["fxgraph_cache_miss"], "used": found["fxgraph_cache_hit"],
                  "seconds": time.perf_counter() - since}))
"""


def first_step(warm: WarmPython, cache: KernelCache) -> dict[str, float]:
    ran = warm.run(COMPILE, env=cache.environment({}))
    assert ran.returncode == 0, ran.stderr[-2000:]
    result: dict[str, float] = json.loads(ran.stdout)
    return result


@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor compiles with g++ here, and there is none")
def test_the_second_segment_uses_what_the_first_compiled(warm: WarmPython, tmp_path: Path) -> None:
    asked = KernelCaches("key", {"TORCHINDUCTOR_CACHE_DIR": "inductor"}, 2**30)
    scratch = Scratch(tmp_path / "kernels-01234567")
    scratch.claim_empty()
    first = KernelCache(asked, tmp_path / "shared", scratch)
    cold = first_step(warm, first)
    assert (cold["compiled"], cold["used"]) == (1, 0)
    assert first.keep(first.new(), "0001-0-node1.tar.gz") > 2
    first.remove()

    scratch.claim_empty()
    second = KernelCache(asked, tmp_path / "shared", scratch)
    second.restore()
    again = first_step(warm, second)
    assert (again["compiled"], again["used"]) == (0, 1)
    assert second.new() == {}
    print(f"first step: {cold['seconds']:.1f} s, with what was kept {again['seconds']:.1f} s")
