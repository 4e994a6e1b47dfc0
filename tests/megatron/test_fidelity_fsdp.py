"""The guard on verl's FSDP engine, which the CPU runs use: real manager, real files, real engine step, FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.utils import fsdp_utils
from verl.utils.checkpoint import fsdp_checkpoint_manager
from verl.workers.engine.fsdp import transformer_impl

from dsv4kit.plugin.fidelity import FidelityError
from dsv4kit.plugin.fidelity_hooks import guard_checkpoints, guard_fsdp_step

pytestmark = pytest.mark.usefixtures("one_rank")

Manager, Engine = fsdp_checkpoint_manager.FSDPCheckpointManager, transformer_impl.FSDPEngine


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fsdp_utils, "get_device_id", lambda: "cpu")  # as the kit's CPU platform answers
    places = [(Manager, "save_checkpoint"), (Manager, "load_checkpoint"), (Engine, "optimizer_step")]
    saved = [(owner, name, vars(owner)[name]) for owner, name in places]
    guard_checkpoints(fsdp_checkpoint_manager)
    guard_fsdp_step(transformer_impl)
    yield
    for owner, name, value in saved:
        setattr(owner, name, value)
        if "_dsv4kit_guarded" in vars(owner):
            delattr(owner, "_dsv4kit_guarded")


class Worker:
    """A model under FSDP2 with verl's manager and engine, as far as a save, a load and a step use them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        self.net.config = SimpleNamespace(save_pretrained=lambda _path: None)  # type: ignore[assignment]
        self.net.can_generate = lambda: False  # type: ignore[assignment]
        fully_shard(self.net, mesh=init_device_mesh("cpu", (1,)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.manager: Any = object.__new__(Manager)
        vars(self.manager).update(
            model=self.net,
            optimizer=self.optimizer,
            lr_scheduler=torch.optim.lr_scheduler.ConstantLR(self.optimizer),
            processing_class=None,
            checkpoint_config={},
            checkpoint_save_contents=["model", "optimizer", "extra"],
            checkpoint_load_contents=["model", "optimizer", "extra"],
            previous_saved_paths=[],
            rank=0,
            world_size=1,
        )
        self.engine: Any = object.__new__(Engine)
        vars(self.engine).update(
            module=self.net,
            optimizer=self.optimizer,
            optimizer_config=SimpleNamespace(clip_grad=1.0),
            _qat_enabled=False,
            scaler=None,
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.ones(4, 8)).sum().backward()
        self.engine.optimizer_step()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    worker = Worker()
    for _ in range(5):
        worker.step()
    worker.manager.save_checkpoint(str(tmp_path))
    assert (tmp_path / "fidelity" / "rank_00000.json").is_file()
    return tmp_path


def test_a_good_resume_passes(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    worker.manager.load_checkpoint(str(checkpoint))
    assert "values of 2 parameters are as saved" in caplog.text
    for _ in range(3):
        worker.step()


def test_files_of_another_run_are_caught(checkpoint: Path) -> None:
    torch.manual_seed(1)
    shard = next(checkpoint.glob("model_world_size_1_rank_0.pt"))
    state = torch.load(shard, weights_only=False)
    state["1.bias"] = state["1.bias"] + 1.0
    torch.save(state, shard)
    with pytest.raises(FidelityError, match=r"0\.1\.bias value \d: saved"):
        Worker().manager.load_checkpoint(str(checkpoint))


def test_a_step_that_writes_something_else_is_caught(checkpoint: Path) -> None:
    worker = Worker()
    worker.manager.load_checkpoint(str(checkpoint))
    before = worker.optimizer.step

    def step() -> None:
        before()
        with torch.no_grad():
            worker.net[0].weight.add_(0.5)

    worker.optimizer.step = step  # type: ignore[method-assign]
    with pytest.raises(FidelityError, match="more than one step can"):
        worker.step()
