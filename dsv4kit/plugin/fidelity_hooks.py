"""Ties the fidelity guard to verl's checkpoint managers and engines (Megatron and FSDP).

`DSV4KIT_FIDELITY=warn` turns violations into log messages, `=0` switches the guard off.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dsv4kit.plugin.fidelity import (
    FidelityError,
    Fingerprint,
    adam_reach,
    check_first_step,
    check_loaded,
    fingerprint,
    read,
    write,
)
from dsv4kit.plugin.patching import PatchError, PatchResult, State, attribute, marked
from dsv4kit.plugin.resume_masters import sampled_stale_masters

_log = logging.getLogger(__name__)

SWITCH = "DSV4KIT_FIDELITY"
FOLDER = "fidelity"
"""Below the checkpoint's `actor` directory, one file per rank; written before verl's manifest."""
_EXPECTED = "_dsv4kit_expected"
_GUARDED = "_dsv4kit_guarded"


@dataclass
class Expectation:
    """What the first step after a load is measured against."""

    take: Callable[[], Fingerprint]
    loaded: Fingerprint
    base: Fingerprint
    masters_equal: bool


def guard_checkpoints(module: ModuleType) -> PatchResult:
    """Writes at save, compares at load; on verl's `megatron_checkpoint_manager` or `fsdp_checkpoint_manager`."""
    names = [name for name in ("MegatronCheckpointManager", "FSDPCheckpointManager") if hasattr(module, name)]
    if not names:
        raise PatchError("no checkpoint manager by the names known (upstream renamed or removed it)")
    manager = getattr(module, names[0])
    if vars(manager).get(_GUARDED):
        return PatchResult(State.APPLIED, "by an earlier call")
    save, load = attribute(manager, "save_checkpoint"), attribute(manager, "load_checkpoint")

    @functools.wraps(save)
    def save_checkpoint(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        with _reported():
            if local_path is not None and self.should_save_model:
                write(_file(local_path, self.rank), fingerprint(_parameters(self)), _layout(self))
        result = save(self, local_path, *args, **kwargs)
        if local_path is not None and self.rank == 0:
            with _reported():
                refuse_unloadable(Path(local_path))
        return result

    @functools.wraps(load)
    def load_checkpoint(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        saved: Fingerprint | None = None
        base: Fingerprint = {}
        with _reported():
            saved = _saved(self, local_path)
            base = fingerprint(_parameters(self), only=saved)
        result = load(self, local_path, *args, **kwargs)
        with _reported():
            if local_path is not None and self.should_load_model:
                _after_load(self, saved, base)
        return result

    manager.save_checkpoint = marked(save_checkpoint, save)
    manager.load_checkpoint = marked(load_checkpoint, load)
    setattr(manager, _GUARDED, True)
    return PatchResult(State.APPLIED)


def refuse_unloadable(checkpoint: Path) -> None:
    """Raises where a file that Megatron has just written cannot be read the way Megatron will read it.

    `common.pt` holds the non-tensors. Megatron-LM fd1121b8 puts the optimizer's classes there in the format
    `fully_reshardable`, and reads it with torch's `weights_only`, which refuses them.
    """
    for path in sorted(checkpoint.rglob("common.pt")):
        try:
            torch.load(path, map_location="cpu", mmap=False)
        except pickle.UnpicklingError as error:
            refused = re.search(r"GLOBAL (\S+)", str(error))
            raise FidelityError(
                "dsv4kit fidelity violation: this checkpoint could be written but never loaded: torch refuses "
                f"{refused[1] if refused else 'what it holds'} in {path}. With this Megatron the optimizer's format "
                "fully_reshardable is of no use: leave dist_ckpt_optim_fully_reshardable at False (dp_reshardable)"
            ) from None


def guard_megatron_step(module: ModuleType) -> PatchResult:
    """Compares after the first step of a resume; on `verl.workers.engine.megatron.transformer_impl`."""
    return _guard_step(attribute(module, "MegatronEngine"))


def guard_fsdp_step(module: ModuleType) -> PatchResult:
    """The same on `verl.workers.engine.fsdp.transformer_impl`."""
    return _guard_step(attribute(module, "FSDPEngine"))


def _guard_step(engine: Any) -> PatchResult:
    if vars(engine).get(_GUARDED):
        return PatchResult(State.APPLIED, "by an earlier call")
    step = attribute(engine, "optimizer_step")

    @functools.wraps(step)
    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        expected: Expectation | None = vars(self.optimizer).pop(_EXPECTED, None)
        reach = None
        if expected is not None:
            with _reported():
                # Before the step: the scheduler changes the rate after it.
                reach = adam_reach(self.optimizer.param_groups)
        result = step(self, *args, **kwargs)
        if expected is not None and reach is not None:
            with _reported():
                after = expected.take()
                check_first_step(expected.loaded, after, expected.base, *reach, expected.masters_equal)
        return result

    engine.optimizer_step = marked(optimizer_step, step)
    setattr(engine, _GUARDED, True)
    return PatchResult(State.APPLIED)


def _after_load(manager: Any, saved: Fingerprint | None, base: Fingerprint) -> None:
    loaded = fingerprint(_parameters(manager), only=saved)
    if saved is not None:
        verdict = check_loaded(saved, base, loaded, exact=_keeps_every_bit(manager))
        if manager.rank == 0:
            _log.warning("dsv4kit fidelity: %s", verdict)
    if manager.optimizer is None:
        return
    if manager.should_load_optimizer and not _keeps_every_bit(manager):
        # The masters are exact, the weights are not: they differ rightly, until the first step has made them equal.
        return
    if stale := sampled_stale_masters(manager.optimizer):
        raise FidelityError(
            "dsv4kit fidelity violation: after the load the optimizer's masters do not hold the loaded weights, "
            f"the first step would overwrite them: {stale}"
        )
    take = functools.partial(_take, manager, list(loaded))
    setattr(
        manager.optimizer, _EXPECTED, Expectation(take, loaded, base, masters_equal=not manager.should_load_optimizer)
    )


def _take(manager: Any, names: list[str]) -> Fingerprint:
    return fingerprint(_parameters(manager), only=names)


def _saved(manager: Any, local_path: Any) -> Fingerprint | None:
    """What was written at the save, where it can be compared; says why where it cannot."""
    if local_path is None or not manager.should_load_model:
        return None
    path = _file(local_path, manager.rank)
    if not path.is_file():
        why = "no fingerprints beside this checkpoint"
    else:
        prints, layout = read(path)
        if layout == _layout(manager):
            return prints
        why = f"the checkpoint was written under another layout ({layout}, now {_layout(manager)})"
    if manager.rank == 0:
        _log.warning("dsv4kit fidelity: %s: the loaded weights are not compared, the first step is", why)
    return None


def _keeps_every_bit(manager: Any) -> bool:
    """False for a load from a Hugging Face export, which Megatron-Bridge may have quantised."""
    return bool(getattr(manager, "should_load_dist_ckpt_model", True))


def _parameters(manager: Any) -> Iterator[tuple[str, Any]]:
    """All parameters with names that the wrappers around the model leave no trace in."""
    chunks = manager.model if isinstance(manager.model, (list, tuple)) else [manager.model]
    for i, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            while name.startswith("module."):
                name = name.removeprefix("module.")
            yield f"{i}.{name}", parameter


def _file(local_path: Any, rank: int) -> Path:
    return Path(local_path) / FOLDER / f"rank_{rank:05d}.json"


def _layout(manager: Any) -> dict[str, int]:
    """What makes a rank's parameters be what they are."""
    layout = {"rank": manager.rank, "world": manager.world_size}
    if isinstance(manager.model, (list, tuple)):
        from importlib import import_module

        state = import_module("megatron.core.parallel_state")
        for name in ("pipeline_model_parallel", "tensor_model_parallel", "expert_model_parallel"):
            with contextlib.suppress(AttributeError, AssertionError):
                layout[name] = getattr(state, f"get_{name}_world_size")()
    return layout


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Lets violations through (or logs them), and keeps a failure of the guard itself from ending a run."""
    try:
        yield
    except FidelityError as violation:
        _log.error(str(violation))
        if os.environ.get(SWITCH) != "warn":
            raise
    except Exception:
        _log.exception("dsv4kit fidelity: the guard itself failed here, and has not compared anything")
