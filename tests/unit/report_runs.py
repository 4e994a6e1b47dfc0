"""Runs as their nodes leave them, for the report: some faults planted, of any size."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from dsv4kit.run import ends, outcome
from dsv4kit.run.directory import ChainLink, RunDir
from dsv4kit.run.files import write_json, write_text

RECORD = """run: {name}
submitted: '2026-11-01T08:00:00+0000'
settings:
  profile: grpo-pro-h100
  description: "DeepSeek-V4-Pro GRPO <b>64</b> nodes"
  data: {{max_response_length: 4096}}
  hardware: {{name: h100}}
site: {{name: far}}
plan:
  verdict: fit
  reasons: []
  predicted:
    gpu: {{stages: [{{stage: 0, need_gib: 67.0}}, {{stage: 1, need_gib: 30.0}}]}}
    host:
      nodes:
      - {{role: stage 0, nodes: 2, first_node: 0, head: false, stages: [0], physical_gb: 1106.0}}
      - {{role: others, nodes: {others}, first_node: 2, head: false, stages: [1], physical_gb: 710.0}}
    step: {{generation_s: 300.0, update_weights_s: 40.0, steady_s: 690.0, first_s: 2585.0, first_warm_s: 900.0}}
    segment: {{save_s: 60.0, setup_s: 400.0, useful: 0.9, node_hours: 100.0}}
versions: {{dsv4kit: 0.0.0}}
"""


def make(
    root: Path,
    name: str = "big",
    *,
    segments: int = 4,
    steps: int = 10,
    nodes: int = 4,
    sample_rows: int = 50,
    fault_at: int | None = 2,
    jump_at: int | None = None,
) -> RunDir:
    """A run whose segment `fault_at` lost a node before its last save; at `jump_at` the learning rate jumps."""
    run = RunDir(root / name)
    total = segments * steps
    spec = {"checkpoint_dir": str(run.checkpoints), "total_steps": total, "segment_steps": steps, "nodes": nodes}
    write_json(run.node_spec_file, spec)
    write_text(run.record_file, RECORD.format(name=name, others=max(1, nodes - 2)))
    write_text(run.checkpoints / "latest_checkpointed_iteration.txt", str(total))
    run.save_chain([ChainLink(number, str(number)) for number in range(1, segments + 1)])
    rng = random.Random(1)
    clock, start = 1_790_000_000.0, 0
    for number in range(1, segments + 1):
        attempt = run.segment(number).attempt(0)
        fault = number == fault_at
        reached = start + steps // 2 if fault else min(total, number * steps)
        write_json(attempt.course_file, {"start": start, "target": number * steps})
        middle, until = clock + 400 + 690 * steps / 2, clock + 400 + 690 * steps
        marks = [("bring-up", clock), ("import", clock + 60), ("steps", clock + 400), ("save", middle)]
        marks += (
            [("steps", middle + 60), ("end", until)]
            if fault
            else [("steps", middle + 60), ("save", until - 60), ("end", until)]
        )
        lines(attempt.phases_file, [{"phase": phase, "time": at} for phase, at in marks])
        made = range(start + 1, (start + steps if fault else reached) + 1)
        lines(
            attempt.metrics_file,
            [{"step": n, "data": metrics(n, n == start + 1, number == jump_at, rng)} for n in made],
        )
        for node in range(nodes):
            samples(attempt.nodes / f"node{node:02}.csv", clock, until, sample_rows, node, rng)
            write_json(
                attempt.nodes / f"node{node:02}.json", {"host": f"node{node:02}", "address": f"10.0.0.{node + 100}"}
            )
        outcome.save(
            outcome.Outcome(
                segment=number,
                attempt=0,
                job_id=str(number),
                start=start,
                target=number * steps,
                reached=reached,
                end=ends.NODE_LOST if fault else ends.COMPLETED,
                next="continue",
                reason="",
                evidence=["node03: </script><script>alert(1)</script> \x1b[2J Xid 79"] if fault else [],
                started=clock,
                ended=until + 20,
            ),
            run.segment(number),
        )
        start, clock = reached, until + 1800
    return run


def metrics(step: int, first: bool, jump: bool, rng: random.Random) -> dict[str, float | None]:
    """What verl logs of a step, its main part."""
    clip = max(0.0, 0.8 - step / 500)
    found: dict[str, float | None] = {
        "training/global_step": step,
        "critic/score/mean": 1 - 2 * clip,
        "critic/score/min": -1.0,
        "critic/score/max": 1.0,
        "response_length/mean": 3000 + rng.random() * 100,
        "response_length/max": 4096,
        "response_length/clip_ratio": clip,
        "response/aborted_ratio": 0.0,
        "training/rollout_actor_probs_pearson_corr": 0.998,
        "training/rollout_probs_diff_mean": 0.001,
        "training/rollout_probs_diff_max": 0.2,
        "actor/lr": 1e-5 if jump else 1e-6,
        "actor/grad_norm": rng.random(),
        "timing_s/step": 2500.0 if first else 690.0,
        "timing_s/gen": 300.0,
        "timing_s/old_log_prob": 60.0,
        "timing_s/update_actor": 250.0,
        "timing_s/update_weights": 40.0,
        "timing_s/save_checkpoint": 50.0 if step % 5 == 0 else 0.0,
    }
    if step == 3:
        found["critic/score/mean"] = None
    if step % 10 == 0:
        found["val-core/aime/acc/mean@8"] = 0.2 + step / 10000
    return found | {f"perf/other{number}": rng.random() for number in range(40)}


def samples(path: Path, begin: float, until: float, rows: int, node: int, rng: random.Random) -> None:
    """Memory of a node with 8 GPUs."""
    names = ["time", "memory_used_mib", "memory_available_mib", "shm_used_mib", *(f"gpu{k}_used_mib" for k in range(8))]
    used = (1000 if node < 2 else 400) * 1024
    text = [",".join(names)]
    for row in range(rows):
        gpus = ",".join(str(60000 + (row * 7919 + k) % 5000) for k in range(8))
        text.append(f"{begin + (until - begin) * row / rows:.1f},{used - row % 5000},500000,1000,{gpus}")
    write_text(path, "\n".join(text) + "\n")


def lines(path: Path, rows: Iterable[dict[str, object]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
