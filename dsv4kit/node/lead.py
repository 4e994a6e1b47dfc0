"""Node 0's part of an attempt: decide, bring up, drive, conclude."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dsv4kit.node import ends, outcome, ports, preflight, ray_cluster
from dsv4kit.node.attempt import Attempt
from dsv4kit.node.driver import Driver
from dsv4kit.node.ends import Evidence
from dsv4kit.node.files import read_json, tail, write_json
from dsv4kit.node.phases import BRING_UP, END, START, Phases
from dsv4kit.node.resume import Plan, plan
from dsv4kit.node.spec import NodeSpec
from dsv4kit.trainer import checkpoints

_POLL_S = 0.1


class AttemptError(Exception):
    """The attempt is over before its driver ended by itself; carries why."""

    def __init__(self, end: str, lines: list[str], excluded: list[str] | None = None) -> None:
        super().__init__(end)
        self.evidence = Evidence(end, lines)
        self.excluded = excluded or []


class Lead:
    """Runs one attempt from node 0 and writes its outcome, whatever happens on the way."""

    def __init__(
        self, spec: NodeSpec, attempt: Attempt, env: Mapping[str, str], temporary: Path, terminated: threading.Event
    ) -> None:
        self.spec, self.attempt, self.env, self.temporary, self.terminated = spec, attempt, env, temporary, terminated
        self.phases = Phases(attempt.dir / "phases.jsonl")
        self.started = time.time()
        self.exit_status: int | None = None

    def run(self, check_node: Callable[[], preflight.NodeReport]) -> None:
        """The whole attempt."""
        self.phases.begin(BRING_UP)
        excluded: list[str] = []
        here = plan(self.spec, self.attempt)
        write_json(self.attempt.dir / "plan.json", here.as_dict())
        for line in here.actions:
            print(f"checkpoints: {line}", flush=True)
        try:
            evidence = self._advance(here, check_node)
        except AttemptError as end:
            evidence, excluded = end.evidence, end.excluded
        finally:
            self.phases.begin(END)
        self._conclude(here, evidence, excluded)
        self.attempt.finish()

    def _advance(self, here: Plan, check_node: Callable[[], preflight.NodeReport]) -> Evidence:
        if here.refusal:
            raise AttemptError(ends.CHECKPOINT, here.refusal)
        if here.start >= self.spec.total_steps:
            return Evidence(ends.NOTHING_TO_DO, [])
        own = check_node()
        if own.problems:
            raise AttemptError(ends.PREFLIGHT, _named([own]), [own.host])
        self._bring_up_ray(own)
        return self._drive(here, own)

    def _bring_up_ray(self, own: preflight.NodeReport) -> None:
        """Starts the head at once and checks the other nodes' reports while it comes up."""
        log = self.attempt.node_file(".ray.log")
        watch: subprocess.Popen[bytes] | None = None

        def start() -> subprocess.Popen[bytes]:
            nonlocal watch
            common = (self.env, self.attempt.dir, log)
            watch = ray_cluster.start_readiness_watch(own.address, self.spec.nodes, self.spec.ray, *common)
            return ray_cluster.start_head(own.address, self.spec.ray, self.temporary, *common)

        head = ray_cluster.Starter(start, self.spec.ray.ready_deadline_s)
        while watch is not None and watch.poll() is None:
            self._check_interrupts()
            self._check_nodes()
            if failure := head.failure(cluster_is_ready=False):
                raise AttemptError(ends.BRING_UP, [failure, *tail(log)])
            time.sleep(_POLL_S)
        if watch is None or watch.returncode != 0:
            self._blame_missing_nodes(log)
        self.attempt.declare_ready()

    def _check_nodes(self) -> None:
        """Ends the attempt when a node's preflight failed or a node gave up."""
        bad = [report for report in self.attempt.reports() if report.problems]
        if bad:
            raise AttemptError(ends.PREFLIGHT, _named(bad), [report.host for report in bad])
        skewed = preflight.clock_skew(self.attempt.reports())
        if skewed:
            raise AttemptError(ends.PREFLIGHT, skewed)
        if failures := self.attempt.failures():
            lines = [f"{host}: {problem}" for host, problem in failures.items()]
            raise AttemptError(ends.NODE_LOST, lines, list(failures))

    def _blame_missing_nodes(self, log: Path) -> None:
        joined = ray_cluster.joined(self.attempt.dir)
        late = [report.host for report in self.attempt.reports() if report.address not in joined]
        silent = self.spec.nodes - len(self.attempt.reports())
        lines = [
            f"not joined after {self.spec.ray.ready_deadline_s:.0f} s: {', '.join(late) or 'none of those heard of'}"
        ]
        if silent:
            lines.append(f"{silent} of {self.spec.nodes} agents never reported")
        raise AttemptError(ends.BRING_UP, lines + tail(log), late)

    def _drive(self, here: Plan, own: preflight.NodeReport) -> Evidence:
        self.phases.begin(START)
        driver = Driver(self.spec, self.attempt.dir, self.phases, here.start, here.target)
        env = {**self.env, "RAY_ADDRESS": f"{own.address}:{ports.GCS}"}
        ended = driver.run(env, self._interrupted)
        self.exit_status = ended.exit_status
        if ended.ended_as:
            return Evidence(ended.ended_as, ended.evidence)
        if checkpoints.read_tracker(Path(self.spec.checkpoint_dir)) == here.target:
            return Evidence(ends.COMPLETED, [])
        if ended.exit_status == 0 and (stopped := read_json(self.attempt.dir / "stopped.json")):
            return Evidence(ends.STOPPED, [f"step {stopped['step']}: {stopped['reason']}"])
        if ended.exit_status == 0:
            line = f"the driver ended by itself at step {driver.steps_done()}, before step {here.target} was saved"
            return Evidence(ends.STOPPED_SHORT, [line])
        with (self.attempt.dir / "driver.log").open(encoding="utf-8", errors="replace") as log:
            return ends.classify(log)

    def _interrupted(self) -> str | None:
        """The class of end that is due now, or None."""
        if self.terminated.is_set():
            return ends.TIME_LIMIT if self.attempt.stop_requested else ends.TERMINATED
        if self.attempt.failures():
            return ends.NODE_LOST
        return None

    def _check_interrupts(self) -> None:
        if self.terminated.is_set():
            raise AttemptError(self._interrupted() or ends.TERMINATED, [])

    def _conclude(self, here: Plan, evidence: Evidence, excluded: list[str]) -> None:
        directory = Path(self.spec.checkpoint_dir)
        reached = here.start if here.refusal else checkpoints.read_tracker(directory) or 0
        failures = self.attempt.failures()
        past = outcome.history(self.attempt.run_dir)
        verdict, reason = outcome.decide(
            evidence.end,
            reached=reached,
            total=self.spec.total_steps,
            start=here.start,
            history=past,
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
            verdict=verdict,
            reason=reason,
            evidence=evidence.lines,
            notes=here.actions,
            excluded_nodes=sorted({*excluded, *failures, *(past[-1].excluded_nodes if past else [])}),
            nodes=[report.host for report in self.attempt.reports()],
            exit_status=self.exit_status,
            started=round(self.started, 3),
            ended=round(time.time(), 3),
        )
        outcome.save(result, self.attempt.segment_dir)
        outcome.announce(result, self.attempt.segment_dir)
        print(f"segment {self.attempt.segment}: {evidence.end}, {verdict}: {reason}", flush=True)


def _named(reports: list[preflight.NodeReport]) -> list[str]:
    return [f"{report.host}: {problem}" for report in reports for problem in report.problems]
