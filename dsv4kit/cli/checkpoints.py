"""`dsv4kit checkpoints`: the checkpoints of a run, which are complete, and what is wrong with the others."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.text_table import aligned

if TYPE_CHECKING:
    from dsv4kit.checkpoint.inspection import StepState

_COLUMNS = ("step", "state", "GB", "age", "stays", "holds")
_SHOW_EVERY_BYTES = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "Show a run's checkpoints. Reads them; changes none."
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    parser.add_argument("--verify", action="store_true", help="compare all bytes with the first time this was asked")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    add_variables(parser, BY_VERB["checkpoints"])


def run(args: argparse.Namespace) -> int:
    """Prints them; 1 where one that the run would go on from is damaged, or a verified one has changed."""
    from dsv4kit.checkpoint import retention
    from dsv4kit.checkpoint.inspection import inspect
    from dsv4kit.cli.runs import chosen_name, open_run
    from dsv4kit.run import metrics, node_spec

    run_dir, _ = open_run(chosen_name(args))
    spec = node_spec.read_as_dict(run_dir)
    found = inspect(Path(spec["checkpoint_dir"]), spec.get("checkpoint_contents"), spec.get("data_ranks"))
    tracked = found.tracker.step
    shown = [_as_dict(step, step.step == tracked) for step in found.steps]
    keep_last = spec.get("keep_last")
    curve = metrics.merge(metrics.read_metrics(attempt.metrics_file) for attempt in run_dir.attempts())
    best = metrics.best(curve, {step.step for step in found.complete}, spec.get("keep_best") or 0)
    why = retention.kept_because(found, keep_last, spec.get("keep_every"), best) if keep_last else {}
    for one in shown:
        one["kept_because"] = why.get(one["step"], ["all stay"])
        one["would_be_pruned"] = not one["kept_because"]
    if args.verify:
        for step, one in zip(found.steps, shown, strict=True):
            one |= _verified(step) if step.complete else {}
    if args.json:
        print(json.dumps({"directory": str(found.directory), "tracker": tracked, "steps": shown}, indent=1))
    else:
        print(found.directory)
        print("\n".join(_table(shown)) if shown else "no checkpoints")
        if found.tracker.problem and shown:
            print(f"the tracker: {found.tracker.problem}")
    current = found.at(tracked)
    return int((current is not None and not current.complete) or any(one.get("changed") for one in shown))


def _as_dict(step: StepState, tracked: bool) -> dict[str, Any]:
    return {
        "step": step.step,
        "complete": step.complete,
        "findings": list(step.findings),
        "bytes": step.total_bytes,
        "files": step.file_count,
        "saved": step.path.lstat().st_mtime,
        "contents": list(step.contents),
        "lossless": {"model", "optimizer"} <= set(step.contents),
        "layout": step.layout.value if step.layout else None,
        "world_size": step.world_size,
        "sizes_recorded": step.recorded,
        "tracker": tracked,
    }


def _verified(step: StepState) -> dict[str, Any]:
    """Reads all of it; shows how far it is on a terminal."""
    from dsv4kit.checkpoint import hashes

    read, told, lock = 0, 0, threading.Lock()

    def progress(count: int) -> None:
        nonlocal read, told
        with lock:
            read += count
            if sys.stderr.isatty() and read - told > _SHOW_EVERY_BYTES:
                told = read
                share = f"{read / 1e9:.0f} GB read, {100 * read / max(step.total_bytes, 1):.0f} %"
                print(f"\rstep {step.step}: {share}", end="", file=sys.stderr, flush=True)

    changed, first = hashes.verify(step.path, progress)
    if told:
        print(file=sys.stderr)
    return {"changed": changed, "verified": "recorded" if first else "changed" if changed else "unchanged"}


def _table(shown: list[dict[str, Any]]) -> list[str]:
    rows = [_COLUMNS, *(_row(one) for one in shown)]
    lines = aligned(rows, right=(0, 2))
    found = [(one["step"], line) for one in shown for line in [*one["findings"], *one.get("changed", [])]]
    return [*lines, *(f"step {step}: {line}" for step, line in found)]


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    state = "complete" if one["complete"] else "damaged"
    if verified := one.get("verified"):
        state += f", {'hashes' if verified == 'recorded' else 'bytes'} {verified}"
    if one["tracker"]:
        state += ", the run goes on from it"
    holds = ", ".join(one["contents"]) + ("" if one["lossless"] else " (lossy)")
    stays = ", ".join(one["kept_because"]) or "no: pruned after the next save"
    return str(one["step"]), state, f"{one['bytes'] / 1e9:.3g}", _age(time.time() - one["saved"]), stays, holds


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
