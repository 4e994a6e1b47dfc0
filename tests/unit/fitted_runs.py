"""Runs made from known constants, as their nodes and verl leave them: what a calibration has to find again.

A step is rollout, update, save, weight update; on every GPU vLLM's share is far above what the trainer holds. Samples
have noise, and nodes, files and whole attempts may be missing or odd.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping
from pathlib import Path

from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted import gpu_phases
from dsv4kit.plan.counted.coefficients import Coefficients, built_in
from dsv4kit.plan.counted.host_memory import held_gb
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.run.directory import RunDir

MIB, GB, GIB = 2**20, 10**9, 2**30
_SAMPLE_S = 20.0


def truth(**values: float) -> Coefficients:
    """The built-in constants with others in place of some; a point in a name is written as two underscores."""
    known = built_in().by_name
    changed = {name.replace("__", "."): value for name, value in values.items()}
    return built_in().with_values(
        {name: known[name]._replace(value=value, low=None, high=None) for name, value in changed.items()}, "truth"
    )


class MadeRun:
    """A run below `path` that went as `real` says; attempts are added one by one."""

    def __init__(self, path: Path, question: Question, real: Coefficients, *, noise: float = 0.01, seed: int = 1):
        self.path, self.question, self.real, self.noise = path, question, real, noise
        self.random = random.Random(seed)
        self.plan = evaluate(question, real)
        self.clock, self.step, self.segment = 1_790_000_000.0, 0, 0
        path.mkdir(parents=True, exist_ok=True)

    def attempt(
        self,
        steps: int = 5,
        *,
        hosts: str = "node",
        save_every: int = 2,
        odd: Mapping[int, float] | None = None,
        without_samples: Collection[int] = (),
        gone: Collection[int] = (),
        gpu_numa_gb: float = 0.0,
    ) -> Path:
        """One segment's attempt on hosts of that name; `odd`: places of nodes that hold so many GB too much.

        Nodes in `without_samples` left no samples, those in `gone` nothing at all.
        """
        self.segment += 1
        attempt = RunDir(self.path).segment(self.segment).attempt(0)
        attempt.nodes.mkdir(parents=True)
        timeline = self._trained(attempt.path, steps, save_every)
        held = self._held()
        for place in range(self.question.parallel.nodes):
            host, address = f"{hosts}{place}", f"10.{self.segment}.{place // 200 + 1}.{100 + place % 200}"
            if place == 0 and self.question.rollout:
                attempt.ray_head_file.write_text(json.dumps({"address": f"{address}:6379"}))
            elif place == 0:
                attempt.torchrun_file.write_text(json.dumps({"address": address}))
            if place in gone:
                continue
            (attempt.nodes / f"{host}.json").write_text(json.dumps({"host": host, "address": address}))
            if place not in without_samples:
                more = (odd or {}).get(place, 0.0)
                rows = self._samples(timeline, place, held[place] + more, more * GB / GIB / 10, gpu_numa_gb)
                (attempt.nodes / f"{host}.csv").write_text("\n".join([*rows, "2.0,12"]))  # killed while writing
        return attempt.path

    def _noisy(self, value: float) -> float:
        return value * (1 + self.random.gauss(0, self.noise))

    def _held(self) -> list[float]:
        q, c, rollout = self.question, self.real, self.plan.memory.rollout
        held = held_gb(q, self.plan.memory.shares, c, rollout.weights_gb if rollout else 0.0)
        base, extra = self.plan.memory.nodes[-1].base_gb, self.plan.memory.nodes[0].head_extra_gb
        return [gb + base + (extra if place == 0 else 0.0) for place, gb in enumerate(held)]

    def _trained(self, path: Path, steps: int, save_every: int) -> list[tuple[str, float, float]]:
        """Writes marks and metrics; the phases of memory with their begins and ends."""
        step, segment = self.plan.step, self.plan.segment
        marks = [{"phase": "bring-up", "time": self.clock}]
        start = self.clock + self._noisy(self.real.of("setup_s"))
        timeline = [("load", self.clock, start)]
        lines = []
        self.clock = start
        marks.append({"phase": "steps", "time": self.clock})
        for number in range(steps):
            self.step += 1
            extra = (step.first_extra_s if self.segment == 1 else step.first_extra_warm_s) if number == 0 else 0.0
            parts = {
                "gen": self._noisy(step.generation_s) + extra if self.question.rollout else 0.0,
                "update_actor": self._noisy(step.train_s) + (0.0 if self.question.rollout else extra),
                "save_checkpoint": self._noisy(segment.timing.save_s) if (number + 1) % save_every == 0 else 0.0,
                "update_weights": self._noisy(step.update_weights_s) if self.question.rollout else 0.0,
            }
            for name, phase in (
                ("gen", "rollout"),
                ("update_actor", "update"),
                ("save_checkpoint", "save"),
                ("update_weights", "refit"),
            ):
                if not parts[name]:
                    continue
                if name == "save_checkpoint":
                    marks.append({"phase": "save", "time": self.clock + self.random.random()})
                timeline.append((phase, self.clock, self.clock + parts[name]))
                self.clock += parts[name]
                if name == "save_checkpoint":
                    marks.append({"phase": "steps", "time": self.clock})
            self.clock += 2.0  # logging
            data = {f"timing_s/{name}": took for name, took in parts.items() if took}
            data |= {"timing_s/step": sum(parts.values()), "training/global_step": self.step}
            if self.question.rollout:
                data |= {"response_length/max": self.question.work.response_tokens}
            else:
                data = {"train/loss": 1.0}
            lines.append(json.dumps({"step": self.step, "data": data}))
        marks.append({"phase": "end", "time": self.clock})
        (path / "phases.jsonl").write_text("\n".join(map(json.dumps, marks)))
        (path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "da']))
        self.clock += 60
        return timeline

    def _samples(
        self, timeline: list[tuple[str, float, float]], place: int, held_gb: float, more_gib: float, numa_gb: float
    ) -> list[str]:
        q = self.question
        gpus = q.parallel.gpus_per_node
        stages = [(place * gpus + gpu) // q.parallel.ranks_per_stage for gpu in range(gpus)]
        need = {
            phase: [
                next((p.need_gib for p in self.plan.memory.stages[stage].phases if p.name == phase), 0.0) + more_gib
                for stage in stages
            ]
            for phase in {name for name, _, _ in timeline}
        }
        assert gpu_phases.UPDATE in need
        header = ["time", "memory_used_mib", "memory_available_mib", "shm_used_mib", "numa0_used_mib"]
        header += ["numa2_used_mib"] * bool(numa_gb) + [f"gpu{gpu}_used_mib" for gpu in range(gpus)]
        rows = [",".join(header)]
        for phase, begin, end in timeline:
            count = max(1, int((end - begin) / _SAMPLE_S))
            for index in range(count):
                full = (held_gb if phase != "load" else held_gb / 2) * (1 - 0.002 * self.random.random())
                used = (full + numa_gb) * GB / MIB
                cells = [f"{begin + (index + 0.5) * (end - begin) / count:.1f}", f"{used:.0f}", "1", "1", f"{used:.0f}"]
                cells += [f"{numa_gb * GB / MIB:.0f}"] * bool(numa_gb)
                cells += [f"{gib * 1024 * (1 - 0.005 * self.random.random()):.0f}" for gib in need[phase]]
                rows.append(",".join(cells))
        return rows
