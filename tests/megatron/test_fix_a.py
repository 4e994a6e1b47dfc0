"""Fix A: main-parameter shards that the inner optimizer accepts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer
from toy import TRAINED, Trainer

from dsv4kit.plugin.megatron_optimizer import no_grad_main_params
from dsv4kit.plugin.optimizer_probes import CudaTyped
from dsv4kit.plugin.patching import PatchError, State

_BUILD = "_build_model_and_main_param_groups"
pytestmark = pytest.mark.usefixtures("one_rank")


def _shard(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What the real class method makes of one parameter; a bf16 one counts as quantised."""
    optimizer = distrib_optimizer.DistributedOptimizer
    monkeypatch.setattr(optimizer, "_is_distopt_quantized_param", classmethod(lambda _cls, _param: True))
    param = CudaTyped(torch.arange(6, dtype=dtype))
    owned = SimpleNamespace(start=2, end=5, size=3)
    group: dict[str, Any] = {"params": [param], "orig_group": {"params": [param]}}
    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False, fp8_recipe="blockwise")
    getattr(optimizer, _BUILD)(
        [{dtype: [{"param_map": {param: {"param": owned}}}]}], {param: (0, dtype, 0)}, [group], config
    )
    (shard,) = group["orig_group"]["params"]
    assert shard.tolist() == [2, 3, 4]
    return shard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "quantised"])
def test_shards_become_leaves(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        torch.optim.AdamW([_shard(dtype, monkeypatch)])
    assert no_grad_main_params(distrib_optimizer).state is State.APPLIED
    shard = _shard(dtype, monkeypatch)
    torch.optim.AdamW([shard])
    assert not shard.requires_grad


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.usefixtures("gpu")
def test_an_offloaded_optimizer_can_be_built(aware: bool) -> None:
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        Trainer(aware=aware, offload=1.0)
    no_grad_main_params(distrib_optimizer)
    Trainer(aware=aware, offload=1.0).step()


@pytest.mark.parametrize("offload", [None, 0.5, 1.0])
@pytest.mark.usefixtures("gpu")
def test_shards_survive_a_write_to_the_weights(offload: float | None) -> None:
    """no_grad alone makes views that autograd refuses after any in-place write, such as a checkpoint load."""
    no_grad_main_params(distrib_optimizer)
    trainer = Trainer(aware=False, offload=offload)
    trainer.fill(TRAINED)
    for group in trainer.megatron.optimizer.param_groups:
        assert all(param.is_leaf for param in group["params"])
    trainer.step()


def test_what_megatron_notes_on_a_shard_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    no_grad_main_params(distrib_optimizer)
    param = CudaTyped(torch.zeros(4))
    param.shared = True  # type: ignore[attr-defined]
    group: dict[str, Any] = {"params": [param], "orig_group": {"params": [param]}}
    ranges = [{torch.float32: [{"param_map": {param: {"param": SimpleNamespace(start=0, end=4, size=4)}}}]}]
    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True, fp8_recipe=None)
    build = getattr(distrib_optimizer.DistributedOptimizer, _BUILD)
    shards = build(ranges, {param: (0, torch.float32, 0)}, [group], config)[3]
    assert shards[0][0] is group["orig_group"]["params"][0]
    assert shards[0][0].shared is True
    assert shards[0][0].data_ptr() == param.data_ptr()


def test_applied_once_and_inert_when_upstream_is_fixed() -> None:
    optimizer = distrib_optimizer.DistributedOptimizer
    assert no_grad_main_params(distrib_optimizer).state is State.APPLIED
    first = vars(optimizer)[_BUILD]
    assert no_grad_main_params(distrib_optimizer).detail == "by an earlier call"
    assert vars(optimizer)[_BUILD] is first
    # What upstream may ship one day: the same function, without autograd.
    fixed = classmethod(torch.no_grad()(first.__func__._dsv4kit_patch))
    setattr(optimizer, _BUILD, fixed)
    assert no_grad_main_params(distrib_optimizer).state is State.NOT_NEEDED
    assert vars(optimizer)[_BUILD] is fixed


def test_a_changed_target_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distrib_optimizer.DistributedOptimizer, _BUILD)
    with pytest.raises(PatchError, match=f"DistributedOptimizer has no '{_BUILD}'"):
        no_grad_main_params(distrib_optimizer)
