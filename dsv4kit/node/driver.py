"""The driver: the unmodified verl module on node 0, watched from the outside until it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.checkpoint import tracker
from dsv4kit.node import processes
from dsv4kit.node.checkpoint_keeper import CheckpointKeeper
from dsv4kit.run import ends, gates, metrics, phases, stacks
from dsv4kit.run.directory import AttemptDir, RunDir
from dsv4kit.run.driver_log import DriverLog, Event, Phase
from dsv4kit.run.files import GrowingFile
from dsv4kit.run.node_spec import NodeSpec
from dsv4kit.run.stacks import ProcessStack

_POLL_S = 0.25
# For the sizes of the last checkpoint; the next segment looks into its files where it has none.
_LAST_RECORD_S = 20.0
# Between two looks lie a quarter of a second and some waiting for files; more was no time in which the driver could
# have spoken: the job was suspended, or the node stood still.
_LONGEST_LOOK_S = 10.0
_SEEDS_PER_START = 10_007
# Of what the processes are doing, in the evidence of a hang.
_LINES = 3
# What the driver does after its log has shown so much.
_AFTER = {
    Phase.STARTED: phases.IMPORT,
    Phase.CONFIGURED: phases.ACTOR,
    Phase.ACTOR_READY: phases.ROLLOUT,
    Phase.ROLLOUT_READY: phases.LOAD,
    Phase.READY: phases.STEPS,
    Phase.TRAINING: phases.STEPS,
}


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


def phase_of(log: DriverLog, saved: int) -> str:
    """What the driver does now; `saved` is the step that verl's tracker names.

    SFT and a driver that shows nothing of its start have told the step they resume from before any engine was ready.
    """
    if log.saving_step is not None and log.saving_step > max(saved, (log.last_step or 0) - 1):
        return phases.SAVE
    if log.first_step is not None or (log.said_step is not None and log.phase in (Phase.STARTED, Phase.CONFIGURED)):
        return phases.STEPS
    return _AFTER[log.phase]


class Silence:
    """How long the driver has said nothing, in time that this process was awake to hear it."""

    def __init__(self) -> None:
        self._looked, self._s = time.monotonic(), 0.0
        self.asked = False
        """Whether the processes have been asked about this one."""

    def end(self) -> None:
        """It has said something."""
        self._s, self._looked, self.asked = 0.0, time.monotonic(), False

    def lasts_s(self) -> float:
        """Seconds so far; to be asked at each look."""
        now = time.monotonic()
        self._s += min(now - self._looked, _LONGEST_LOOK_S)
        self._looked = now
        return self._s


class Driver:
    """Runs the driver and watches its end, the step it resumed at, that it moves, and what it has saved.

    `notes`: what the log told beside, one readable line each.
    """

    def __init__(
        self,
        spec: NodeSpec,
        attempt: AttemptDir,
        phase_marks: phases.Phases,
        start: int,
        argv: Sequence[str],
        explain: Callable[[], Sequence[ProcessStack]] = tuple,
    ) -> None:
        """`argv` is `command`'s, for a segment that begins after step `start`.

        `explain` tells what the processes of all nodes are doing; it is asked when the driver is silent.
        """
        self._explain, self.odd_nodes = explain, list[str]()
        self._spec, self._attempt, self._phases = spec, attempt, phase_marks
        self._start, self._argv = start, argv
        self._log = DriverLog()
        self._saved = start
        self.checkpoints = CheckpointKeeper(spec, attempt, start)
        self._not_numbers: dict[str, int] = {}
        self.notes: list[str] = []
        self._gates: gates.GateWatch | None = None
        self.stopped_by_gates: list[str] = []
        """What the gates that stop the run have seen."""

    def run(self, env: Mapping[str, str], interrupted: Callable[[], str | None]) -> DriverEnd:
        """Blocks until the driver has ended. `interrupted` names a class of end once the segment has to stop."""
        self.checkpoints.begin()
        if self._spec.gates:
            run = RunDir(self._attempt.segment.path.parents[1])
            curve = metrics.merge(metrics.read_metrics(attempt.metrics_file) for attempt in run.attempts())
            self._gates = gates.GateWatch(
                self._spec.gates, [step for step in curve if step.trained and step.step <= self._start]
            )
        process = processes.start(self._argv, env, self._attempt.driver_log, self._attempt.path)
        try:
            return self._watch(process, interrupted)
        finally:
            processes.end(process)
            self.checkpoints.settle(_LAST_RECORD_S)
            self._note_saved()
            for name, steps in self._not_numbers.items():
                if steps > 1:
                    self._note(f"{name} was not a number in {steps} steps")
            if phase_of(self._log, self._saved) == phases.SAVE:
                self._note(f"it ended while the checkpoint of step {self._log.saving_step} was being saved")

    def _watch(self, process: subprocess.Popen[bytes], interrupted: Callable[[], str | None]) -> DriverEnd:
        log, lines = self._log, GrowingFile(self._attempt.driver_log)
        silence, records = Silence(), GrowingFile(self._attempt.metrics_file)
        while True:
            exit_status = process.poll()
            for line in lines.new_lines():
                self._tell(log.feed(line.decode(errors="replace")))
                silence.end()
            for line in records.new_lines():
                silence.end()
                if (record := metrics.parse_line(line)) and record.trained and self._trained(record):
                    return DriverEnd(processes.end(process), ends.GATE, self.stopped_by_gates)
            if contradiction := log.contradicts(self._start):
                return DriverEnd(processes.end(process), ends.WRONG_STEP, [contradiction])
            self._note_saved()
            self._phases.begin(phase_of(log, self._saved))
            if exit_status is not None:
                return DriverEnd(exit_status, None, [])
            if end := interrupted():
                return DriverEnd(processes.end(process), end, [])
            lasts, allowed = silence.lasts_s(), self._allowed_silence_s()
            if lasts > allowed / 2 and not silence.asked:
                silence.asked = True
                for place in stacks.described(self._explain())[:_LINES]:
                    self._note(f"no sign of life for {lasts:.0f} s: {place}")
            if lasts > allowed:
                found = self._explain()
                self.odd_nodes = stacks.odd_nodes(found)
                evidence = f"no log line and no finished step for {lasts:.0f} s"
                return DriverEnd(processes.end(process), ends.STALLED, [evidence, *stacks.described(found)[:_LINES]])
            time.sleep(_POLL_S)

    def _trained(self, record: metrics.StepMetrics) -> bool:
        """A step was made: what its metrics tell. Whether a gate ends the driver at once."""
        # The rank that logs may be on another node, and its lines in that node's log.
        if self._log.first_step is None:
            self._log.first_step = record.step
        for name in record.not_numbers:
            if name not in self._not_numbers:
                self._note(f"{name} is not a number (NaN or infinite) in step {record.step}")
            self._not_numbers[name] = self._not_numbers.get(name, 0) + 1
        now = False
        for finding in self._gates.feed(record) if self._gates else ():
            if finding.action == gates.WARN:
                if finding.gate != gates.NOT_A_NUMBER:  # said above
                    self._note(finding.line)
                continue
            self.stopped_by_gates.append(f"{finding.line} (watch.gates.{finding.gate}: {finding.action})")
            self._note(self.stopped_by_gates[-1])
            if finding.action == gates.STOP:
                self._attempt.segment.stop_file.touch()
            now = now or finding.action == gates.STOP_NOW
        return now

    def _allowed_silence_s(self) -> float:
        """A save says nothing until it is done, so as long as one is planned to take is allowed besides."""
        limits = self._spec.limits
        return limits.stall_s + (limits.save_s if self._phases.now == phases.SAVE else 0.0)

    def _tell(self, events: Iterable[Event]) -> None:
        """Each begin of a phase at the moment it is logged, and what a reader of the run should know."""
        for event in events:
            self._phases.begin(phase_of(self._log, self._saved))
            if event.kind == "data order lost" and self._start > 0:
                self._note(
                    f"the order of the data was lost at the resume from step {self._start}, and begins anew:"
                    f" {event.line.removeprefix('Warning: ')}"
                )

    def _note(self, line: str) -> None:
        self.notes.append(line)
        self._phases.note(line)

    def _note_saved(self) -> None:
        """Which step the tracker names by now, and what has become of the checkpoints."""
        self._saved = max(self._saved, tracker.read_tracker(Path(self._spec.checkpoint_dir)) or 0)
        for line in self.checkpoints.new_lines():
            self._note(line)

    def steps_done(self) -> int:
        """The last step whose metrics were written."""
        last = metrics.last_step(self._attempt.metrics_file)
        return self._start if last is None else last
