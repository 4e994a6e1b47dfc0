"""The fidelity guard on verl's own checkpoint managers and engine steps; workers are stubs, the optimizer is real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer
from toy import BASE, LR, TRAINED, Trainer
from verl.utils.checkpoint import fsdp_checkpoint_manager, megatron_checkpoint_manager
from verl.workers.engine.fsdp import transformer_impl as fsdp_engine
from verl.workers.engine.megatron import transformer_impl as megatron_engine

from dsv4kit.plugin import fidelity
from dsv4kit.plugin.fidelity import FidelityError
from dsv4kit.plugin.fidelity_hooks import guard_checkpoints, guard_fsdp_step, guard_megatron_step
from dsv4kit.plugin.megatron_optimizer import no_grad_main_params
from dsv4kit.plugin.patching import State
from dsv4kit.plugin.resume_masters import refresh_after_load

pytestmark = pytest.mark.usefixtures("one_rank", "gpu")

Manager = megatron_checkpoint_manager.MegatronCheckpointManager
Engine = megatron_engine.MegatronEngine
Fsdp = fsdp_checkpoint_manager.FSDPCheckpointManager
_PLACES = [(Manager, "save_checkpoint"), (Manager, "load_checkpoint"), (Engine, "optimizer_step")]
_PLACES += [(Fsdp, "save_checkpoint"), (Fsdp, "load_checkpoint"), (fsdp_engine.FSDPEngine, "optimizer_step")]


@pytest.fixture(autouse=True)
def the_guard_works(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The guard swallows its own failures, which would make a test of it say nothing."""
    yield
    if "broken_guard" not in request.node.name:
        assert "the guard itself failed" not in "".join(r.message for r in caplog.get_records("call"))


@pytest.fixture(autouse=True)
def verls_own_code(upstream: None) -> Iterator[None]:
    saved = [(owner, name, vars(owner)[name]) for owner, name in _PLACES]
    no_grad_main_params(distrib_optimizer)
    yield
    for owner, name, value in saved:
        setattr(owner, name, value)
        if "_dsv4kit_guarded" in vars(owner):
            delattr(owner, "_dsv4kit_guarded")


class Disk:
    """Where the stub managers keep weights: `loads` is what a load finds there."""

    def __init__(self) -> None:
        self.loads: float | None = TRAINED


def _managed(trainer: Trainer, disk: Disk, contents: tuple[str, ...] = ("model", "extra"), exact: bool = True) -> Any:
    manager = object.__new__(Manager)
    manager.model, manager.optimizer, manager.rank, manager.world_size = [trainer.ddp], trainer.optimizer, 0, 1
    manager.checkpoint_save_contents = manager.checkpoint_load_contents = list(contents)
    manager.use_dist_checkpointing = exact
    manager.disk, manager.trainer = disk, trainer
    return manager


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """verl's save and load replaced by ones without files, before the guard wraps them."""

    def load(self: Any, local_path: str, *_args: Any, **_kwargs: Any) -> None:
        if self.disk.loads is not None:
            self.trainer.fill(self.disk.loads)

    monkeypatch.setattr(Manager, "save_checkpoint", lambda self, local_path, *_a, **_k: None)
    monkeypatch.setattr(Manager, "load_checkpoint", load)
    return Disk()


def _step(trainer: Trainer) -> None:
    """verl's engine step."""
    trainer.ddp.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    for param in trainer.net.parameters():
        param.main_grad.fill_(0.5)
    Engine.optimizer_step(SimpleNamespace(optimizer=trainer.optimizer))  # type: ignore[arg-type]


def _saved(tmp_path: Path, storage: Disk, value: float = TRAINED) -> None:
    """A checkpoint of a run that has reached `value`."""
    assert guard_checkpoints(megatron_checkpoint_manager).state is State.APPLIED
    assert guard_megatron_step(megatron_engine).state is State.APPLIED
    first = Trainer(aware=True, offload=1.0)
    first.fill(value)
    _managed(first, storage).save_checkpoint(str(tmp_path))
    assert (tmp_path / "fidelity" / "rank_00000.json").is_file()


def test_a_good_resume_passes(tmp_path: Path, storage: Disk) -> None:
    assert refresh_after_load(megatron_checkpoint_manager).state is State.APPLIED
    _saved(tmp_path, storage)
    second = Trainer(aware=True, offload=1.0)
    _managed(second, storage).load_checkpoint(str(tmp_path))
    _step(second)
    assert second.weights() == {"layer": TRAINED, "router": pytest.approx(TRAINED - LR)}


def test_stale_masters_are_caught_before_the_first_step(tmp_path: Path, storage: Disk) -> None:
    _saved(tmp_path, storage)
    second = Trainer(aware=True, offload=1.0)
    with pytest.raises(FidelityError, match=r"masters do not hold the loaded weights.*2 offloaded copies"):
        _managed(second, storage).load_checkpoint(str(tmp_path))


def test_stale_masters_planted_after_the_load_are_caught_by_the_first_step(tmp_path: Path, storage: Disk) -> None:
    refresh_after_load(megatron_checkpoint_manager)
    _saved(tmp_path, storage)
    second = Trainer(aware=True, offload=1.0)
    _managed(second, storage).load_checkpoint(str(tmp_path))
    for master in second.megatron.optimizer.gpu_params_map_cpu_copy.values():
        master.data.fill_(BASE)
    with pytest.raises(FidelityError, match="48 of 48 such values are back at the base model's") as caught:
        _step(second)
    message = str(caught.value)
    assert ": 5 -> 1, allowed 5 to 5, base model 1" in message
    assert message.count("0.layer.weight") == message.count("0.router.weight") == 1


def test_a_load_that_does_nothing_is_caught(tmp_path: Path, storage: Disk) -> None:
    _saved(tmp_path, storage)
    storage.loads = None
    with pytest.raises(FidelityError, match="saved 5, loaded 1, before the load 1"):
        _managed(Trainer(aware=True, offload=1.0), storage).load_checkpoint(str(tmp_path))


def test_a_violation_can_be_a_warning(
    tmp_path: Path, storage: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSV4KIT_FIDELITY", "warn")
    _saved(tmp_path, storage)
    storage.loads = None
    _managed(Trainer(aware=True, offload=1.0), storage).load_checkpoint(str(tmp_path))
    assert "fidelity violation" in caplog.text


def test_what_a_quantised_export_loses_is_said(tmp_path: Path, storage: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """Saved at 1.01, exported as 1.0: within FP4, but all of the change since the base model is gone."""
    refresh_after_load(megatron_checkpoint_manager)
    _saved(tmp_path, storage, value=1.0078125)
    storage.loads = BASE
    second = Trainer(aware=True, offload=1.0)
    _managed(second, storage, exact=False).load_checkpoint(str(tmp_path))
    assert "error is 100% of all the change since the base model" in caplog.text
    _step(second)


def test_an_export_of_other_weights_is_caught(tmp_path: Path, storage: Disk) -> None:
    _saved(tmp_path, storage)
    storage.loads = BASE
    with pytest.raises(FidelityError, match="the loaded weights are not the saved ones"):
        _managed(Trainer(aware=True, offload=1.0), storage, exact=False).load_checkpoint(str(tmp_path))


def test_another_layout_is_not_compared_but_the_step_is(
    tmp_path: Path, storage: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    refresh_after_load(megatron_checkpoint_manager)
    _saved(tmp_path, storage)
    second = Trainer(aware=True, offload=1.0)
    manager = _managed(second, storage)
    manager.world_size = 2
    storage.loads = 3.0
    manager.load_checkpoint(str(tmp_path))
    assert "another layout" in caplog.text
    for master in second.megatron.optimizer.gpu_params_map_cpu_copy.values():
        master.data.fill_(BASE)
    with pytest.raises(FidelityError):
        _step(second)


def test_a_broken_guard_does_not_end_a_save(
    tmp_path: Path, storage: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guard_checkpoints(megatron_checkpoint_manager)
    monkeypatch.setattr("dsv4kit.plugin.fidelity_hooks.fingerprint", lambda *_a, **_k: 1 / 0)
    _managed(Trainer(aware=True, offload=1.0), storage).save_checkpoint(str(tmp_path))
    assert "the guard itself failed" in caplog.text


def test_applied_once() -> None:
    for guard, module in (
        (guard_checkpoints, megatron_checkpoint_manager),
        (guard_checkpoints, fsdp_checkpoint_manager),
        (guard_megatron_step, megatron_engine),
        (guard_fsdp_step, fsdp_engine),
    ):
        assert guard(module).state is State.APPLIED
        assert guard(module).detail == "by an earlier call"


def test_fingerprints_survive_the_disk(tmp_path: Path) -> None:
    named = [(f"layers.{i}.experts.w", torch.randn(1000).to(torch.bfloat16)) for i in range(5)]
    named += [("router.weight", torch.randn(7)), ("norm.weight", torch.randn(0))]
    prints = fidelity.fingerprint(named)
    assert list(prints) == ["layers.0.experts.w", "layers.4.experts.w", "router.weight"]
    assert [len(s.values) for s in prints.values()] == [64, 64, 7]
    fidelity.write(tmp_path / "x" / "rank.json", prints, {"rank": 3})
    back, layout = fidelity.read(tmp_path / "x" / "rank.json")
    assert layout == {"rank": 3}
    for name, was in prints.items():
        assert torch.equal(back[name].values, was.values)
        assert (back[name].kind, back[name].dtype, back[name].size) == (was.kind, was.dtype, was.size)
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["rank.json"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_steps_of_adam_are_never_refused(dtype: torch.dtype) -> None:
    """The bound holds for any history of gradients, with masters kept and with fresh ones."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(40):
        lr = 10.0 ** -(1 + trial % 6)
        master = torch.nn.Parameter(torch.randn(256, generator=generator) * 10.0 ** -(trial % 3))
        optimizer = torch.optim.AdamW([master], lr=lr, betas=(0.9, 0.95 if trial % 2 else 0.999), weight_decay=0.1)
        history = trial % 7
        for step in range(history + 1):
            if step == history:
                if history == 0:
                    master.data = master.data.to(dtype).float()
                before = fidelity.fingerprint([("w", master.detach().to(dtype).clone())])
            spread = 10.0 ** (4 * torch.rand((), generator=generator).item() - 2)
            master.grad = torch.randn(256, generator=generator) * spread
            optimizer.step()
        after = fidelity.fingerprint([("w", master.detach().to(dtype).clone())])
        reach = fidelity.adam_reach(optimizer.param_groups)
        assert reach is not None
        fidelity.check_first_step(before, after, {}, *reach, masters_equal=history == 0)


def test_optimizers_without_a_bound_are_not_judged() -> None:
    assert fidelity.adam_reach(torch.optim.SGD([torch.zeros(1)], lr=1.0).param_groups) is None
