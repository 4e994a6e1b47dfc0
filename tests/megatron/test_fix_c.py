"""Fix C: a resume without optimizer state trains the weights it loaded. Base 1.0, loaded 5.0, one step of 0.001."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer
from toy import LR, TRAINED, Trainer
from verl.utils.checkpoint import megatron_checkpoint_manager
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

from dsv4kit.plugin.megatron_optimizer import no_grad_main_params
from dsv4kit.plugin.patching import PatchError, State
from dsv4kit.plugin.resume_masters import refresh_after_load, refresh_masters

pytestmark = pytest.mark.usefixtures("one_rank", "gpu")

KINDS = [(False, None), (False, 1.0), (False, 0.5), (True, 1.0), (True, 0.5)]
IDS = ["plain", "offloaded", "half offloaded", "aware offloaded", "aware half offloaded"]


@pytest.fixture(autouse=True)
def buildable(upstream: None) -> None:
    no_grad_main_params(distrib_optimizer)


def _loaded(aware: bool, offload: float | None, mixed: bool = True) -> Trainer:
    trainer = Trainer(aware=aware, offload=offload, mixed=mixed)
    trainer.fill(TRAINED)
    return trainer


@pytest.mark.parametrize(("aware", "offload"), KINDS, ids=IDS)
def test_without_the_fix_the_loaded_bf16_weights_are_gone(aware: bool, offload: float | None) -> None:
    trainer = _loaded(aware, offload)
    trainer.step()
    # 1.0 - 0.001, rounded to bf16.
    assert trainer.weights()["layer"] == 1.0
    if offload == 1.0:
        assert trainer.weights()["router"] == pytest.approx(1.0 - LR)


def test_megatrons_own_reload_does_not_help() -> None:
    aware, plain = _loaded(True, 1.0), _loaded(False, 1.0)
    for trainer in (aware, plain):
        trainer.optimizer.reload_model_params()
        trainer.step()
    assert aware.weights() == {"layer": TRAINED, "router": pytest.approx(1.0 - LR)}
    assert plain.weights() == {"layer": 1.0, "router": pytest.approx(1.0 - LR)}


@pytest.mark.parametrize(("aware", "offload"), KINDS, ids=IDS)
@pytest.mark.parametrize("mixed", [True, False], ids=["bf16 and fp32", "bf16"])
def test_with_the_fix_they_stay(aware: bool, offload: float | None, mixed: bool) -> None:
    trainer = _loaded(aware, offload, mixed)
    refreshed = refresh_masters(trainer.optimizer)
    assert sum(refreshed.stale.values()) >= 1
    trainer.step()
    assert trainer.weights()["layer"] == TRAINED
    assert trainer.weights()["router"] == pytest.approx(TRAINED, abs=2 * LR)


@pytest.mark.parametrize(("aware", "offload"), KINDS, ids=IDS)
def test_twice_is_once(aware: bool, offload: float | None) -> None:
    trainer = _loaded(aware, offload)
    refresh_masters(trainer.optimizer)
    assert sum(refresh_masters(trainer.optimizer).stale.values()) == 0


@pytest.mark.parametrize(("aware", "offload"), KINDS, ids=IDS)
def test_a_more_precise_master_of_the_same_weight_is_kept(aware: bool, offload: float | None) -> None:
    """Where upstream refreshes the masters itself, or from better weights, nothing is lost."""
    trainer = Trainer(aware=aware, offload=offload, mixed=False)
    for _ in range(3):
        trainer.step()
    inner = trainer.megatron.optimizer
    copies = getattr(inner, "param_to_inner_param", None) or {p: p for g in inner.param_groups for p in g["params"]}
    before = [master.clone() for master in copies.values()]
    assert any(not torch.equal(m, m.bfloat16().float()) for m in before)
    refresh_masters(trainer.optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, copies.values(), strict=True))


def test_masters_inside_a_fused_optimizer() -> None:
    """Stand-ins for Transformer Engine's FusedAdam, which needs a GPU: fp32 masters and 16-bit remainders."""
    weight = torch.full((2,), TRAINED, dtype=torch.bfloat16)
    for master, expected in ((torch.ones(2), TRAINED), (torch.ones(2, dtype=torch.int16), 0)):
        inner = SimpleNamespace(state={weight: {"master_param": master}})
        refresh_masters(SimpleNamespace(optimizer=inner))
        assert master.tolist() == [expected] * 2


def test_megatron_fsdp_is_refused() -> None:
    stub = SimpleNamespace(optimizer=object(), ddp_config=SimpleNamespace(use_megatron_fsdp=True))
    with pytest.raises(RuntimeError, match="not possible with Megatron-FSDP"):
        refresh_masters(stub)


def _manager(trainer: Trainer, contents: list[str]) -> Any:
    """verl's manager with what this path of it uses; its constructor wants a whole model configuration."""
    manager = object.__new__(MegatronCheckpointManager)
    manager.model, manager.optimizer, manager.optimizer_scheduler = [trainer.ddp], trainer.optimizer, None
    manager.checkpoint_load_contents = contents
    manager.use_megatron_fsdp = manager.use_dist_checkpointing = False
    manager.use_distributed_optimizer, manager.peft_cls, manager.rank, manager.vanilla_bridge = True, None, 0, False
    manager.bridge = SimpleNamespace(load_hf_weights=lambda _model, _path: trainer.fill(TRAINED))
    return manager


def test_verls_load_refreshes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MegatronCheckpointManager, "load_checkpoint", MegatronCheckpointManager.load_checkpoint)
    (tmp_path / "model" / "huggingface").mkdir(parents=True)
    before, after = Trainer(aware=True, offload=1.0), Trainer(aware=True, offload=1.0)
    _manager(before, ["model"]).load_checkpoint(str(tmp_path))
    before.step()
    assert before.weights()["layer"] == 1.0
    assert refresh_after_load(megatron_checkpoint_manager).state is State.APPLIED
    assert refresh_after_load(megatron_checkpoint_manager).detail == "by an earlier call"
    _manager(after, ["model"]).load_checkpoint(str(tmp_path))
    after.step()
    assert after.weights() == {"layer": TRAINED, "router": pytest.approx(TRAINED - LR)}


def test_a_changed_target_is_named() -> None:
    other = type("MegatronCheckpointManager", (), {"load_checkpoint": lambda self: None})
    with pytest.raises(PatchError, match="should_load_optimizer"):
        refresh_after_load(SimpleNamespace(MegatronCheckpointManager=other))  # type: ignore[arg-type]
