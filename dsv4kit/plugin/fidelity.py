"""Whether a resume has the weights that were saved, and whether its first step trains those: the comparisons.

A few values of a few parameters are written beside each checkpoint. After a load they must be there again, and the
first optimizer step must not change one by more than one step of Adam can. A stale master (resume_masters.py) fails
the second by thousands of steps' worth; nothing else in a run shows it. `fidelity_hooks` ties this to verl.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4kit.run.files import write_text

SCHEMA = 1
VALUES = 64
"""Values taken of a parameter, evenly spread."""
PARAMETERS = 2
"""Parameters taken of each kind and dtype: the first and the last."""
SHOWN = 5

# First match wins. Kinds differ in dtype, in sharding, or in who owns their optimizer state.
_KINDS = (
    ("mtp", ("mtp.",)),
    ("experts", (".experts.",)),
    ("router", ("router", ".gate.")),
    ("embedding", ("embed",)),
    ("output", ("output_layer", "lm_head")),
    ("norm", ("norm", "hyper_connection")),
    ("attention", ("attention", "attn")),
)


class FidelityError(RuntimeError):
    """The weights are not what they must be; the message is the evidence."""


@dataclass(frozen=True)
class Slice:
    """Some values of one parameter, exactly (every dtype trained here fits in fp32)."""

    name: str
    kind: str
    dtype: str
    size: int
    largest: float
    """The largest magnitude in the whole parameter: what a block scale may be made for."""
    values: torch.Tensor


Fingerprint = dict[str, Slice]


def kind_of(name: str) -> str:
    """What a parameter of this name is."""
    return next((kind for kind, parts in _KINDS if any(part in name for part in parts)), "other")


def fingerprint(named: Iterable[tuple[str, Any]], only: Iterable[str] | None = None) -> Fingerprint:
    """The slices of these parameters: of a choice of them, or of `only`."""
    parameters = {name: local for name, p in named if not _is_quantised(p) and (local := _local(p)).numel()}
    names = _choice(parameters) if only is None else [name for name in only if name in parameters]
    return {name: _slice(name, parameters[name]) for name in names}


def _choice(parameters: dict[str, torch.Tensor]) -> list[str]:
    classes: dict[tuple[str, torch.dtype], list[str]] = {}
    for name, parameter in parameters.items():
        classes.setdefault((kind_of(name), parameter.dtype), []).append(name)
    ends = PARAMETERS // 2
    return [name for names in classes.values() for name in dict.fromkeys([*names[:ends], *names[-ends:]])]


def _is_quantised(parameter: Any) -> bool:
    """Transformer Engine's own tensors: their steps are those of the format, and they cannot be flattened."""
    return type(parameter).__module__.startswith("transformer_engine")


def _local(parameter: Any) -> torch.Tensor:
    """This rank's part of a sharded parameter."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()


def positions(size: int) -> torch.Tensor:
    """Where the values are taken."""
    return torch.linspace(0, size - 1, min(VALUES, size), dtype=torch.float64).long()


def _slice(name: str, parameter: torch.Tensor) -> Slice:
    flat = parameter.reshape(-1)
    values = flat[positions(flat.numel()).to(flat.device)].float().cpu()
    largest = flat.abs().max().item()
    return Slice(name, kind_of(name), str(parameter.dtype).removeprefix("torch."), flat.numel(), largest, values)


def write(path: Path, prints: Fingerprint, layout: dict[str, Any]) -> None:
    """Puts a fingerprint on disk, whole or not at all."""
    rows = [
        {
            "name": s.name,
            "kind": s.kind,
            "dtype": s.dtype,
            "size": s.size,
            "largest": s.largest,
            "values": base64.b64encode(struct.pack(f"<{len(s.values)}f", *s.values.tolist())).decode(),
        }
        for s in prints.values()
    ]
    write_text(path, json.dumps({"schema": SCHEMA, "layout": layout, "slices": rows}))


def read(path: Path) -> tuple[Fingerprint, dict[str, Any]]:
    """A fingerprint and the layout it was taken under."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["schema"] != SCHEMA:
        raise ValueError(f"{path}: schema {content['schema']}, this version reads {SCHEMA}")
    prints = {}
    for row in content["slices"]:
        packed = base64.b64decode(row.pop("values"))
        values = struct.unpack(f"<{len(packed) // 4}f", packed)
        prints[row["name"]] = Slice(values=torch.tensor(values, dtype=torch.float32), **row)
    return prints, content["layout"]


def check_loaded(saved: Fingerprint, base: Fingerprint, loaded: Fingerprint, exact: bool) -> str:
    """What the load has made of the saved values, in a sentence; raises when it is not what was saved.

    `base` is what the weights were before the load, `exact` whether the checkpoint's format keeps every bit. One that
    does not (a quantised export) may be off by what MXFP4 costs: a quarter of a value, or a sixteenth of the largest.
    """
    same = [name for name in saved if name in loaded and loaded[name].size == saved[name].size]
    if not same:
        return "no parameter in common with what was saved: not compared"
    wrong: dict[str, list[tuple[float, str]]] = {}
    learnt, lost = 0.0, 0.0
    for name in same:
        was, now = saved[name].values.double(), loaded[name].values.double()
        tolerance = torch.zeros_like(was) if exact else was.abs() / 4 + saved[name].largest / 16
        for i in torch.nonzero(~((now - was).abs() <= tolerance)).flatten().tolist():
            text = f"value {i}: saved {was[i]:.9g}, loaded {now[i]:.9g}, before the load {_at(base, name, i)}"
            wrong.setdefault(name, []).append((abs(now[i] - was[i]).item(), text))
        if name in base and base[name].size == saved[name].size:
            learnt += (was - base[name].values.double()).square().sum().item()
            lost += (now - was).square().sum().item()
    total = sum(len(saved[name].values) for name in same)
    if wrong:
        raise FidelityError(_evidence("the loaded weights are not the saved ones", wrong, total))
    found = f"{total} values of {len(same)} parameters are as saved"
    if exact or learnt == 0:
        return found
    share = math.sqrt(lost / learnt)
    return (
        f"{found} up to the precision of the checkpoint's format, whose error is {share:.0%} of all the change since "
        "the base model (100%: nothing of it is left)"
    )


def check_first_step(
    before: Fingerprint, after: Fingerprint, base: Fingerprint, reach: float, decay: float, masters_equal: bool
) -> None:
    """Raises when a value has moved further than the first step can move it.

    `reach` is the largest change of a master by the gradient, `decay` the share of its value that weight decay takes.
    A weight is its master, rounded; `masters_equal` says that before the step the master was the weight itself.
    """
    wrong: dict[str, list[tuple[float, str]]] = {}
    back_at_base = 0
    for name, start in before.items():
        if name not in after or after[name].size != start.size:
            continue
        dtype = getattr(torch, start.dtype)
        was, now = start.values.double(), after[name].values.double()
        slack = reach + decay * was.abs()
        if not masters_equal:
            slack = slack + torch.finfo(dtype).eps * was.abs()
        # Rounding keeps order, so the rounded ends of what a master can be are the ends of what the weight can be.
        low, high = ((was + sign * slack).to(dtype).double() for sign in (-1, 1))
        for i in torch.nonzero(~((low <= now) & (now <= high))).flatten().tolist():
            excess = abs(now[i] - was[i]).item()
            at_base = name in base and abs(now[i] - base[name].values[i]).item() <= max(slack[i].item(), 1e-2 * excess)
            back_at_base += at_base
            text = f"value {i}: {was[i]:.9g} -> {now[i]:.9g}, allowed {low[i]:.9g} to {high[i]:.9g}, base model "
            wrong.setdefault(name, []).append((excess, text + _at(base, name, i)))
    if wrong:
        number = sum(map(len, wrong.values()))
        what = (
            "the first step after the resume changed weights by more than one step can; "
            f"{back_at_base} of {number} such values are back at the base model's (stale masters)"
        )
        raise FidelityError(_evidence(what, wrong, sum(len(s.values) for s in before.values())))


def adam_reach(groups: Iterable[dict[str, Any]]) -> tuple[float, float] | None:
    """The `reach` and `decay` of one step of AdamW over these parameter groups; None for another optimizer.

    Adam moves a value by at most lr * (1 - b1) / sqrt(1 - b2), or lr if that is more (Kingma and Ba, section 2.1). Half
    as much again for eps, rounding of the moments and bias correction.
    """
    reach, decay = 0.0, 0.0
    for group in groups:
        if "betas" not in group:
            return None
        first, second = group["betas"]
        lr = abs(float(group["lr"]))
        reach = max(reach, 1.5 * lr * max(1.0, (1 - first) / math.sqrt(1 - second) if second < 1 else 1.0))
        decay = max(decay, 1.5 * lr * abs(float(group.get("weight_decay") or 0.0)))
    return reach, decay


def _at(base: Fingerprint, name: str, i: int) -> str:
    known = name in base and i < len(base[name].values)
    return f"{base[name].values[i].item():.9g}" if known else "unknown"


def _evidence(what: str, wrong: dict[str, list[tuple[float, str]]], total: int) -> str:
    """The worst value of each parameter, the worst parameters first."""
    worst = sorted(((*max(rows), name) for name, rows in wrong.items()), reverse=True)
    listed = "".join(f"\n  {name} {text}" for _, text, name in worst[:SHOWN])
    more = f"\n  and {len(worst) - SHOWN} more parameters" if len(worst) > SHOWN else ""
    return f"dsv4kit fidelity violation: {what}. {sum(map(len, wrong.values()))} of {total} values:{listed}{more}"
