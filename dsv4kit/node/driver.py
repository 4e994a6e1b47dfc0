"""The driver: the unmodified verl module on node 0, watched from the outside until it ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.checkpoint import inspection, tracker
from dsv4kit.node import processes
from dsv4kit.run import ends, metrics
from dsv4kit.run.driver_log import DriverLog
from dsv4kit.run.node_spec import NodeSpec
from dsv4kit.run.phases import STEPS, Phases

_POLL_S = 0.25
_SEEDS_PER_START = 10_007


@dataclass(frozen=True)
class DriverEnd:
    """How the driver ended: its exit status, and the class where the watch ended it itself (else None)."""

    exit_status: int
    ended_as: str | None
    evidence: list[str]


def command(
    spec: NodeSpec, start: int, target: int, runner: Sequence[str] = (sys.executable, "-u"), hydra_dir: str = "hydra"
) -> list[str]:
    """The driver's argv for the steps after `start` up to `target`; `hydra_dir` is relative to where it runs."""
    return [
        *runner,
        "-m",
        spec.module,
        *spec.overrides,
        f"trainer.total_training_steps={spec.total_steps if spec.stops_by_plugin else target}",
        # Epochs must never be what ends a run: verl would then exit without a save, and with success.
        f"trainer.total_epochs={spec.total_steps}",
        f"hydra.run.dir={hydra_dir}",  # below the attempt: the configuration as verl composed it
        *(f"actor_rollout_ref.rollout.seed={seed}" for seed in _rollout_seed(spec, start)),
    ]


def _rollout_seed(spec: NodeSpec, start: int) -> Iterator[int]:
    """vLLM's generator is in no checkpoint: with one seed for all segments each would draw the first one's noise again.

    verl adds the replica's number, so the seeds of two starts lie further apart than there are replicas.
    """
    if spec.rollout_seed is not None:
        yield (spec.rollout_seed + start * _SEEDS_PER_START) % 2**31


class Driver:
    """Runs the driver and watches its end, the step it resumed at, that it moves, and what it has saved."""

    def __init__(self, spec: NodeSpec, attempt_dir: Path, phases: Phases, start: int, argv: Sequence[str]) -> None:
        """`argv` is `command`'s, for a segment that begins after step `start`."""
        self._spec, self._dir, self._phases = spec, attempt_dir, phases
        self._start, self._argv = start, argv
        self._log_path = attempt_dir / "driver.log"
        self._metrics_path = attempt_dir / "metrics.jsonl"
        self._saved = start

    def run(self, env: Mapping[str, str], interrupted: Callable[[], str | None]) -> DriverEnd:
        """Blocks until the driver has ended. `interrupted` names a class of end once the segment has to stop."""
        process = processes.start(self._argv, env, self._log_path, self._dir)
        try:
            return self._watch(process, interrupted)
        finally:
            processes.end(process)
            self._note_saved()

    def _watch(self, process: subprocess.Popen[bytes], interrupted: Callable[[], str | None]) -> DriverEnd:
        log, lines = DriverLog(), _follow(self._log_path)
        last_sign_of_life, seen_metrics, in_steps = time.monotonic(), 0, False
        while True:
            exit_status = process.poll()
            for line in next(lines):
                log.feed(line)
                last_sign_of_life = time.monotonic()
            size = _size(self._metrics_path)
            if size > seen_metrics:
                seen_metrics, last_sign_of_life = size, time.monotonic()
                # The rank that logs may be on another node, and its lines in that node's log.
                if log.first_step is None and (steps := _trained(self._metrics_path)):
                    log.first_step = steps[0]
            if contradiction := log.contradicts(self._start):
                return DriverEnd(processes.end(process), ends.WRONG_STEP, [contradiction])
            if not in_steps and log.resumed_step is not None:
                in_steps = True
                self._phases.begin(STEPS)
            self._note_saved()
            if exit_status is not None:
                return DriverEnd(exit_status, None, [])
            if end := interrupted():
                return DriverEnd(processes.end(process), end, [])
            if (silence := time.monotonic() - last_sign_of_life) > self._spec.limits.stall_s:
                evidence = f"no log line and no finished step for {silence:.0f} s"
                return DriverEnd(processes.end(process), ends.STALLED, [evidence])
            time.sleep(_POLL_S)

    def _note_saved(self) -> None:
        """Records the sizes of every file of a checkpoint once the tracker names it, for the next segment's check."""
        directory = Path(self._spec.checkpoint_dir)
        step = tracker.read_tracker(directory)
        if step is not None and step > self._saved:
            with contextlib.suppress(inspection.CheckpointError, OSError):  # not whole yet: the next look tries again
                inspection.record_sizes(
                    directory / f"global_step_{step}", self._spec.checkpoint_contents, self._spec.data_ranks
                )
                self._saved = step

    def steps_done(self) -> int:
        """The last step whose metrics were written."""
        last = metrics.last_metrics(self._metrics_path)
        return last.step if last else self._start


def _follow(path: Path) -> Iterator[list[str]]:
    """At each `next`, the whole lines the file has gained since."""
    rest = b""
    with path.open("rb") as file:
        while True:
            rest += file.read()
            *whole, rest = rest.split(b"\n")
            yield [line.decode(errors="replace") for line in whole]


def _trained(path: Path) -> list[int]:
    return [step.step for step in metrics.read_metrics(path) if step.trained]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
