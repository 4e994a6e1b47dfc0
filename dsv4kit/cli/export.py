"""`dsv4kit export`: a checkpoint as a directory that vLLM and transformers load."""

from __future__ import annotations

import argparse
import shlex

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = (
        "Makes a Hugging Face directory of a run's checkpoint, in a job of its own on one node: weights in bfloat16"
        " (of Megatron: as the checkpoint has them), tokenizer and chat template. Exit status 1 where it fails."
    )
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    add_variables(parser, BY_VERB["export"])


def run(args: argparse.Namespace) -> int:
    """Submits the job, waits for it, and says where the model is."""
    from dsv4kit.cli.runs import chosen_name, open_run
    from dsv4kit.launch import export

    run_dir, slurm = open_run(chosen_name(args))
    wanted = export.of(run_dir, slurm, step_of(args.step))
    wanted.check()
    if args.dry_run:
        print(wanted.script().render("COMMAND OF SUBMITIT"))
        return 0
    print(f"run {run_dir.name}: step {wanted.step} of {wanted.request.checkpoint}; {wanted.space}", flush=True)
    sent = wanted.send()
    state = sent.wait(lambda line: print(line, flush=True))
    if not wanted.model.is_dir():
        print(f"not exported (job {state}): {sent.problem()}; see {sent.run.segment(1).path}")
        return 1
    print(f"{wanted.model}: `vllm serve {shlex.quote(str(wanted.model))}` serves it")
    return 0


def step_of(text: str | None) -> int | None:
    """STEP as a number. Raises UserError."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) > 0 and len(text) < 16):
        raise UserError(f"STEP={text!r}: not a whole number above 0")
    return int(text)
