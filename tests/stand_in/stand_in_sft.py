"""Stands in for verl's SFT trainer under torchrun: one process per rank, SFT's checkpoint layout, the last rank logs.

STAND_IN_FAULT="crash@STEP": the last rank dies there, once per run, and the others wait for it as in a collective.
STAND_IN_GATE as of the other stand-in. STAND_IN_COMPILES: each rank compiles a kernel of its own and one that all have.
"""

import json
import os
import sys
import time
import zipfile
from pathlib import Path

from stand_in_trainer import argument, due_fault, last_step, wait_at_gate

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def save(directory: Path, step: int) -> None:
    """This rank's files; rank 0 waits for the others' and writes the tracker."""
    root = directory / f"global_step_{step}"
    root.mkdir(parents=True, exist_ok=True)
    for name in (f"{kind}_world_size_{WORLD}_rank_{RANK}.pt" for kind in ("model", "optim", "extra_state")):
        archive(root / name, step)
    archive(root / f"data_{RANK}.pt", step)
    if RANK == 0:
        (root / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))
        (root / "huggingface").mkdir(exist_ok=True)
        (root / "huggingface" / "config.json").write_text("{}")
        while len(list(root.glob("data_*.pt"))) < WORLD:
            time.sleep(0.02)
        (directory / "latest_checkpointed_iteration.txt").write_text(str(step))


def archive(path: Path, step: int) -> None:
    """A file as torch.save writes it, whole from the first moment it is there."""
    temporary = path.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w") as made:
        made.writestr("archive/data.pkl", f"step {step}")
    temporary.rename(path)


def compile_kernels() -> None:
    """Where Triton's would go; says which were there."""
    for name in ("everywhere", f"rank{RANK}"):
        kernel = Path(os.environ["TRITON_CACHE_DIR"], name, "kernel.so")
        print(f"rank {RANK}: {name} {'found' if kernel.exists() else 'compiled'}", flush=True)
        kernel.parent.mkdir(parents=True, exist_ok=True)
        kernel.write_text("machine code")


def main() -> int:
    """One rank's run, up to the last step."""
    directory = Path(argument("trainer.default_local_dir"))
    total, save_freq = last_step(), int(argument("trainer.save_freq"))
    tracker = directory / "latest_checkpointed_iteration.txt"
    step = int(tracker.read_text()) if tracker.exists() else 0
    print(f"rank {RANK} of {WORLD} on {os.environ.get('MASTER_ADDR')}", flush=True)
    if RANK == 0 and step:
        print(f"Found latest checkpoint: {directory}/global_step_{step} (step {step})", flush=True)
    if os.environ.get("STAND_IN_COMPILES"):
        compile_kernels()
    logs = Path(os.environ["VERL_FILE_LOGGER_PATH"])
    while step < total:
        step += 1
        wait_at_gate(step)
        if os.environ.get("STAND_IN_FAULT") and (RANK == WORLD - 1):
            if due_fault(step, directory.parent / "fault-committed"):
                print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", flush=True)
                return 1
        elif (
            os.environ.get("STAND_IN_FAULT") == f"crash@{step}" and not (directory.parent / "fault-committed").exists()
        ):
            time.sleep(3600)
        time.sleep(float(os.environ.get("STAND_IN_STEP_S", "0.1")))
        if step % save_freq == 0 or step == total:
            save(directory, step)
        if RANK == WORLD - 1:
            with logs.open("a") as file:
                file.write(json.dumps({"step": step, "data": {"train/loss": 1 / step}}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
