"""Node 0's part of an attempt: decide, bring up, drive, conclude."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from dsv4kit.checkpoint import tracker
from dsv4kit.node import driver, preflight, restart
from dsv4kit.node.attempt import Attempt
from dsv4kit.node.launcher import AttemptError, Launcher
from dsv4kit.node.resume import set_course
from dsv4kit.run import ends, exclusions, metrics, outcome, stacks
from dsv4kit.run.course import Course
from dsv4kit.run.ends import Evidence
from dsv4kit.run.files import GrowingFile, read_json
from dsv4kit.run.lease import Lease, LeaseHeldError, Owner
from dsv4kit.run.node_files import NodeReport, NodesSeen
from dsv4kit.run.node_spec import NodeSpec
from dsv4kit.run.phases import BRING_UP, CONTAINER_START, END, IMPORT, Phases, seconds
from dsv4kit.run.stacks import ProcessStack

_POLL_S = 0.25
# A driver dies of its node's raylet in the same moment; what watches the head looks once a second.
_HEAD_SPEAKS_S = 3.0
_OF_A_DEAD_HEAD = (ends.NODE_LOST, ends.PROCESS_DIED, ends.KILLED, ends.UNKNOWN)
# It writes when it signals, which is when the agent ends.
_SLURM_SPEAKS_LOOKS = 8
# The node whose task ended first, or the reason of a cancellation; not what follows from them on the other nodes.
_SLURM_SAYS = re.compile(
    r"^(srun: error: ([^:]+: tasks? [^:]+: (?!Terminated)|Node failure on )"
    r"|slurmstepd[^:]*: error: .*(CANCELLED AT|DUE TO|oom))"
)
# All nodes check themselves at the same time, so what one finds others find soon.
_ALL_REPORTS_S = 15.0
# All nodes wait for it; what is left then is deleted while the next segment trains.
_DELETING_S = 60.0


class Lead:
    """Runs one attempt from node 0 and writes its outcome, whatever happens on the way."""

    def __init__(self, spec: NodeSpec, attempt: Attempt, terminated: threading.Event) -> None:
        self.spec, self.attempt, self.terminated = spec, attempt, terminated
        self.phases = Phases(attempt.files.phases_file)
        self.started = time.time()
        self.exit_status: int | None = None
        self.driver: driver.Driver | None = None
        self.head_lost = False
        self.notes: list[str] = []
        self.clocks = preflight.clocks()
        self.slurm_says = GrowingFile(attempt.segment_dir.log)
        self.slurm_says.new_lines()  # what it says from now on
        owner = Owner(attempt.job_id, attempt.segment, attempt.number, socket.gethostname())
        self.lease = Lease(attempt.run.path, owner)

    def run(self, prepare: Callable[[], tuple[NodeReport, Launcher]]) -> None:
        """The whole attempt; `prepare` sets up and checks this node, and makes its launcher."""
        if began := self.attempt.container_began():
            self.phases.begin(CONTAINER_START, began)
        self.phases.begin(BRING_UP)
        again = False
        try:
            self.lease.take(self.terminated.is_set)
        except LeaseHeldError as held:
            self._step_aside(held.owner)
        else:
            again = self._run(prepare)
        finally:
            self.lease.give_back()
            self.attempt.finish(again)

    def _step_aside(self, owner: str) -> None:
        """Another trainer of this run is at work: nothing is repaired, started or saved."""
        saved = tracker.read_tracker(Path(self.spec.checkpoint_dir)) or 0
        end = ends.TERMINATED if self.terminated.is_set() else ends.ANOTHER_LIVE
        self._conclude(Course(saved, saved), Evidence(end, [_live(owner)]), [])

    def _run(self, prepare: Callable[[], tuple[NodeReport, Launcher]]) -> bool:
        """The attempt; whether this job makes another one."""
        excluded: list[str] = []
        saved = tracker.read_tracker(Path(self.spec.checkpoint_dir)) or 0
        here = Course(saved, saved)
        try:
            here = set_course(self.spec, self.attempt)
            here.save(self.attempt.files)
            for line in here.actions:
                print(f"checkpoints: {line}", flush=True)
            evidence = self._advance(here, prepare)
        except AttemptError as end:
            evidence, excluded = end.evidence, end.excluded
        except Exception as error:  # whatever it is, the next one has to know that it was not the trainer
            traceback.print_exc()
            evidence = Evidence(ends.AGENT_FAILED, [f"{type(error).__name__}: {error}", *_raised_at(error)])
        finally:
            self.phases.begin(END)
        again = self._conclude(here, evidence, excluded)
        if self.driver:
            self.driver.checkpoints.close(0.0 if again else _DELETING_S, self.terminated)
            for line in self.driver.checkpoints.new_lines():
                print(f"checkpoints: {line}", flush=True)
        return again

    def _advance(self, here: Course, prepare: Callable[[], tuple[NodeReport, Launcher]]) -> Evidence:
        if here.refusal:
            raise AttemptError(ends.CHECKPOINT, here.refusal)
        if here.start >= self.spec.total_steps:
            return Evidence(ends.NOTHING_TO_DO, [])
        own, launcher = prepare()
        if own.problems:
            self._refuse_bad_nodes()
        launcher.bring_up(own, here.target, self._watch_nodes)
        return self._drive(here, own, launcher)

    def _watch_nodes(self) -> NodesSeen:
        """One look at the nodes; ends the attempt when Slurm does, another job took the lease or a node gave up."""
        if owner := self.lease.lost:
            raise AttemptError(ends.ANOTHER_LIVE, [_live(owner)])
        if self.terminated.is_set():
            raise AttemptError(self._interrupted() or ends.TERMINATED, [])
        seen = self.attempt.look()
        if any(report.problems for report in seen.reports):
            self._refuse_bad_nodes()
        if skewed := self.clocks.off(seen.reports, time.time()):
            raise AttemptError(ends.PREFLIGHT, skewed)
        if seen.failures:
            lines = [f"{host}: {problem}" for host, problem in seen.failures.items()]
            raise AttemptError(ends.NODE_LOST, lines, list(seen.failures))
        return seen

    def _refuse_bad_nodes(self) -> NoReturn:
        """Ends the attempt for the nodes that failed their checks: all of them, so that each is avoided at once."""
        deadline = time.monotonic() + _ALL_REPORTS_S
        while len(self.attempt.look().reports) < self.spec.nodes and time.monotonic() < deadline:
            if self.terminated.wait(_POLL_S):
                break
        bad = [report for report in self.attempt.look().reports if report.problems]
        raise AttemptError(ends.PREFLIGHT, _named(bad), [report.host for report in bad])

    def _drive(self, here: Course, own: NodeReport, launcher: Launcher) -> Evidence:
        self.phases.begin(IMPORT)
        argv = driver.command(self.spec, here.start, here.target, launcher.runner(own))
        running = driver.Driver(self.spec, self.attempt.files, self.phases, here.start, argv, self._explain)
        self.driver = running
        ended = running.run(launcher.driver_env(own), lambda: self._interrupted(launcher) or launcher.interrupted())
        self.exit_status, self.notes = ended.exit_status, running.notes
        if ended.ended_as == ends.ANOTHER_LIVE:
            return Evidence(ends.ANOTHER_LIVE, [_live(self.lease.lost or "unknown")])
        if ended.ended_as == ends.NODE_LOST:
            self._blame(own, launcher.own_failure())
        if running.odd_nodes:
            raise AttemptError(ends.STALLED, ended.evidence, running.odd_nodes)
        if ended.ended_as not in (None, ends.PART_ENDED):
            return Evidence(ended.ended_as, ended.evidence)
        if tracker.read_tracker(Path(self.spec.checkpoint_dir)) == here.target:
            return Evidence(ends.COMPLETED, [])
        if ended.exit_status == 0 and (stopped := read_json(self.attempt.files.stopped_file)):
            return Evidence(ends.STOPPED, [f"step {stopped['step']}: {stopped['reason']}"])
        if ended.exit_status == 0:
            line = f"the driver ended by itself at step {running.steps_done()}, before step {here.target} was saved"
            return Evidence(ends.STOPPED_SHORT, [line])
        found = launcher.evidence(ended.exit_status)
        if head_failure := launcher.own_failure(_HEAD_SPEAKS_S if found.end in _OF_A_DEAD_HEAD else 0.0):
            self._blame(own, head_failure, found.lines)
        return found

    def _explain(self) -> Sequence[ProcessStack]:
        return stacks.ask(self.attempt.files, self.spec.nodes)

    def _blame(self, own: NodeReport, head_failure: str | None, lines: Sequence[str] = ()) -> NoReturn:
        """Ends the attempt for the node that is lost: this one where its head is, else those that say so."""
        if head_failure:
            self.head_lost = True
            raise AttemptError(ends.NODE_LOST, [f"{own.host}: {head_failure}", *lines], [own.host])
        failures = self.attempt.look().failures
        raise AttemptError(ends.NODE_LOST, [f"{host}: {text}" for host, text in failures.items()], list(failures))

    def _interrupted(self, launcher: Launcher | None = None) -> str | None:
        """The class of end that is due now, or None."""
        if self.lease.lost:
            return ends.ANOTHER_LIVE
        if self.terminated.is_set():
            return ends.TIME_LIMIT if self.attempt.stop_requested else ends.TERMINATED
        if (launcher and launcher.own_failure()) or self.attempt.look().failures:
            return ends.NODE_LOST
        return None

    def _conclude(self, here: Course, evidence: Evidence, excluded: list[str]) -> bool:
        """Writes what the attempt did and what is next; whether that is another attempt of this job."""
        directory = Path(self.spec.checkpoint_dir)
        if self.driver and self.driver.stopped_by_gates and evidence.end != ends.ANOTHER_LIVE:
            # However it ended after that: the next attempt would go on with what was not to go on.
            lines = [line for line in evidence.lines if line not in self.driver.stopped_by_gates]
            evidence = Evidence(ends.GATE, [*self.driver.stopped_by_gates, *lines])
        if evidence.end == ends.TERMINATED and not evidence.lines:
            evidence = Evidence(ends.TERMINATED, self._slurms_words())
        reached = here.start if here.refusal else tracker.read_tracker(directory) or 0
        seen = self.attempt.look()
        # A worker that lost a dead head did not fail.
        bad = sorted({*excluded, *(() if self.head_lost else seen.failures)})
        self._exclude(bad, seen, evidence)
        following, reason = outcome.decide(
            evidence.end,
            reached=reached,
            total=self.spec.total_steps,
            start=here.start,
            history=outcome.since_resume(self.attempt.run),
            limit=self.spec.limits.max_attempts_without_progress,
        )
        result = outcome.Outcome(
            segment=self.attempt.segment,
            attempt=self.attempt.number,
            job_id=self.attempt.job_id,
            start=here.start,
            target=here.target,
            reached=reached,
            end=evidence.end,
            next=following,
            reason=reason,
            evidence=evidence.lines,
            notes=[*here.actions, *self.notes],
            excluded_nodes=[one.node for one in exclusions.active(self.attempt.run, time.time())],
            nodes=[report.host for report in seen.reports],
            exit_status=self.exit_status,
            started=round(self.started, 3),
            ended=round(time.time(), 3),
        )
        if again := self._restarts(result, bool(bad)):
            result = dataclasses.replace(result, again=True, reason=f"{result.reason}; started again in the same job")
        outcome.save(result, self.attempt.segment_dir)
        if not again:  # the batch script reads it once the last attempt is over
            outcome.announce(result, self.attempt.segment_dir)
        read = outcome.load(self.attempt.files) or result  # as every reader has it: cancelled
        print(f"segment {read.segment}: {read.end}, {read.next}: {read.reason}", flush=True)
        return again

    def _restarts(self, result: outcome.Outcome, avoided: bool) -> bool:
        if self.terminated.is_set() or self.attempt.stop_requested or outcome.is_cancelled(self.attempt.files):
            return False
        steps = [step for step in metrics.read_metrics(self.attempt.files.metrics_file) if step.trained]
        needed = restart.needed_s(seconds(self.phases.marks, time.time()), len(steps))
        left = float(os.environ.get("SLURM_JOB_END_TIME", "inf")) - time.time()
        limit = self.spec.limits.restarts
        return restart.is_due(result, avoided, self.attempt.restarts, limit, left, needed)

    def _slurms_words(self) -> list[str]:
        """Why Slurm ended the job, and where, as far as its own log of the job says so by now."""
        found: list[str] = []
        for _ in range(_SLURM_SPEAKS_LOOKS):
            lines = (line.decode(errors="replace").strip() for line in self.slurm_says.new_lines())
            found += [line for line in lines if _SLURM_SAYS.search(line)]
            if found:
                break
            time.sleep(_POLL_S)
        return found[:3]

    def _exclude(self, hosts: list[str], seen: NodesSeen, evidence: Evidence) -> None:
        """Writes down the nodes that the run avoids from now on, by Slurm's names, each with its own reason."""
        names = {report.host: report.slurm_node or report.host for report in seen.reports}
        own = self.attempt.segment
        for host in hosts:
            lines = [line.removeprefix(f"{host}: ") for line in evidence.lines if line.startswith(f"{host}: ")]
            reason = "; ".join(lines) or seen.failures.get(host) or evidence.end
            found = exclusions.Exclusion(round(time.time(), 1), own, names.get(host, host), reason)
            exclusions.add(self.attempt.run, [found])


def _raised_at(error: Exception) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f"in {Path(frames[-1].filename).name}, line {frames[-1].lineno}"] if frames else []


def _live(owner: str) -> str:
    return f"another job of this run is live: {owner}"


def _named(reports: list[NodeReport]) -> list[str]:
    return [f"{report.host}: {problem}" for report in reports for problem in report.problems]
