"""Makes a Hugging Face directory of a checkpoint, in a job of its own: the doctor's visit, with this as its work.

`torchrun ... -m dsv4kit.node.export` is one process on one node. What it makes is looked through before it gets its
name: a directory `model` is whole, or is not there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from dsv4kit.checkpoint import shard_files
from dsv4kit.node.doctor import NodeVisit, make
from dsv4kit.run import export
from dsv4kit.run.directory import AttemptDir, RunDir
from dsv4kit.run.export import ExportRequest
from dsv4kit.run.files import write_text

_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
_TEMPLATE = "chat_template.jinja"


class ExportFailedError(Exception):
    """What was made cannot be loaded; the text says why."""


class ExportVisit(NodeVisit):
    """The job's one node. Slurm's time limit ends it, nothing else."""

    work = "the export"
    limit_s = float("inf")


def run(export_dir: str) -> None:
    """What submitit runs."""
    make(ExportVisit, export_dir)


def convert(request: ExportRequest, out: Path) -> None:
    """Makes `out`. Raises ExportFailedError where the merger fails or its work is not whole."""
    source = Path(request.checkpoint)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if request.form == export.FSDP:
        merged = subprocess.run(merge_command(source, partial), check=False)
        if merged.returncode != 0:
            raise ExportFailedError(f"verl.model_merger ended with status {merged.returncode}")
    else:
        shutil.copytree(source / request.weights, partial, copy_function=_link)
    if request.chat_template is not None:
        (partial / _TEMPLATE).unlink(missing_ok=True)  # it may be the checkpoint's own file, linked
        write_text(partial / _TEMPLATE, request.chat_template)
    if found := problems(partial):
        raise ExportFailedError("; ".join(found))
    partial.rename(out)


def merge_command(source: Path, target: Path) -> list[str]:
    """verl's merger, as its command line is in verl 0.9.1 (verl/model_merger/base_model_merger.py)."""
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    return [*command, "--local_dir", str(source), "--target_dir", str(target)]


def problems(directory: Path) -> list[str]:
    """Why neither vLLM nor transformers can load a directory; every file that its index names is looked at."""
    files = shard_files.walk_sizes(directory)
    found = shard_files.huggingface_problems(directory, "", files)
    if shard_files.read_json_object(directory / "config.json") is None:
        found.append("config.json is missing or cut short")
    if not any(files.get(name) for name in _TOKENIZER):
        found.append(f"no tokenizer: none of {', '.join(_TOKENIZER)}")
    return found


def _link(source: str, target: str) -> None:
    """Another name for the file, which costs no space and outlives the checkpoint; a copy where that cannot be."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)


def main() -> int:
    """One process: the export that the attempt belongs to."""
    attempt = AttemptDir(Path(os.environ["DSV4KIT_ATTEMPT_DIR"]))
    here = RunDir(attempt.segment.path.parents[1])
    try:
        convert(export.load(here), export.model(here))
    except (ExportFailedError, OSError) as error:
        print(f"export: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
