"""Stands in for verl's driver where a test is about the kit and not about training: its arguments, files, log lines.

It resumes from the tracker, makes a step in STAND_IN_STEP_S seconds, saves FSDP-shaped checkpoints, writes metrics, and
misbehaves on request: STAND_IN_FAULT="KIND@STEP" (crash, hang, oom, nan, no-save), once per run unless "KIND@STEP!".
Before it begins it says STAND_IN_SAYS. STAND_IN_GATE="STEP:FILE": the step begins when the file is there, however long
that takes. STAND_IN_METRICS='{"STEP": {"name": value}}' is put into a step's metrics.
"""

import json
import os
import re
import sys
import time
import zipfile
from pathlib import Path


def argument(key: str) -> str:
    """The last override of that key, without its quotes."""
    found = [word.partition("=")[2] for word in sys.argv[1:] if word.lstrip("+").startswith(f"{key}=")]
    text = found[-1]
    return text[1:-1].replace("\\'", "'") if text.startswith("'") else text


def last_step() -> int:
    """The end of the run, or of the segment where an agent planned one: what the kit's plugin does inside verl."""
    total = int(argument("trainer.total_training_steps"))
    plan = Path(os.environ.get("DSV4KIT_ATTEMPT_DIR", "/nowhere"), "plan.json")
    return min(total, json.loads(plan.read_text())["target"]) if plan.exists() else total


def save(directory: Path, step: int, ranks: int) -> None:
    """A checkpoint as verl's FSDP engine lays it out, the tracker last."""
    actor = directory / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True, exist_ok=True)
    files = [
        actor / f"{kind}_world_size_{ranks}_rank_{rank}.pt"
        for kind in ("model", "optim", "extra_state")
        for rank in range(ranks)
    ]
    for path in [*files, actor.parent / "data.pt"]:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", f"step {step}")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    huggingface = actor / "huggingface"
    huggingface.mkdir(exist_ok=True)
    (huggingface / "config.json").write_text("{}")
    (directory / "latest_checkpointed_iteration.txt").write_text(str(step))


def due_fault(step: int, marker: Path) -> str:
    """The fault to commit before this step, if any."""
    match = re.fullmatch(r"([a-z-]+)@(\d+)(!?)", os.environ.get("STAND_IN_FAULT", ""))
    if not match or int(match[2]) != step or (marker.exists() and not match[3]):
        return ""
    marker.touch()
    return match[1]


def wait_at_gate(step: int) -> None:
    """Until a test lets this step begin: what it arranges beside the run takes a different time on each machine."""
    at, _, file = os.environ.get("STAND_IN_GATE", "").partition(":")
    while at == str(step) and not Path(file).exists():
        time.sleep(0.05)


def stop_requested() -> bool:
    """Whether the segment is asked to end at a step boundary, as the kit's plugin looks for it."""
    attempt = os.environ.get("DSV4KIT_ATTEMPT_DIR")
    return attempt is not None and (Path(attempt).parent / "STOP").exists()


def main() -> int:
    """One run of the driver, up to the last step."""
    directory = Path(argument("trainer.default_local_dir"))
    directory.mkdir(parents=True, exist_ok=True)
    total, save_freq = last_step(), int(argument("trainer.save_freq"))
    ranks = int(argument("trainer.nnodes")) * int(argument("trainer.n_gpus_per_node"))
    tracker = directory / "latest_checkpointed_iteration.txt"
    step = int(tracker.read_text()) if tracker.exists() else 0
    print(os.environ.get("STAND_IN_SAYS", ""), flush=True)
    if step:
        print(
            f"(TaskRunnerV1 pid=1) Resuming from {directory}/global_step_{step}, setting global step to {step}",
            flush=True,
        )
    else:
        print("(TaskRunnerV1 pid=1) Training from scratch", flush=True)
    with Path(os.environ["VERL_FILE_LOGGER_PATH"]).open("w") as metrics:
        while step < total:
            step += 1
            wait_at_gate(step)
            fault = due_fault(step, directory.parent / "fault-committed")
            if fault == "crash":
                print("RuntimeError: NCCL error: unhandled system error", flush=True)
                return 1
            if fault == "oom":
                print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", flush=True)
                return 1
            if fault == "hang":
                time.sleep(3600)
            if fault == "no-save":
                return 0
            time.sleep(float(os.environ.get("STAND_IN_STEP_S", "0.2")))
            if step % save_freq == 0 or step == total:
                save(directory, step, ranks)
            data = {"training/global_step": step, "critic/score/mean": step / 100, "timing_s/step": 0.2}
            data |= {"actor/grad_norm": None if fault == "nan" else 1.0}
            data |= json.loads(os.environ.get("STAND_IN_METRICS", "{}")).get(str(step), {})
            metrics.write(json.dumps({"step": step, "data": data}) + "\n")
            metrics.flush()
            print(
                f"(TaskRunnerV1 pid=1) step:{step} - training/global_step:{step} - critic/score/mean:{step / 100}",
                flush=True,
            )
            if stop_requested() and step < total:
                save(directory, step, ranks)
                stopped = Path(os.environ["DSV4KIT_ATTEMPT_DIR"], "stopped.json")
                stopped.write_text(json.dumps({"step": step, "reason": "stop requested"}))
                return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
