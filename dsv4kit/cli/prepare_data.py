"""`dsv4kit prepare data`: a known data set, or files of one's own, in the columns verl reads."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4kit import hints
from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.errors import UserError

if TYPE_CHECKING:
    from dsv4kit.prepare.work import Request

HELP = "data sets in the columns verl reads: GSM8K, DAPO-Math-17k, AIME, and files of your own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the action takes."""
    add_variables(parser, BY_VERB["prepare data"])


def run(args: argparse.Namespace) -> int:
    """Prepares, and shows what came of it."""
    from dsv4kit.feasibility.data_checks import reward_problem
    from dsv4kit.prepare import data, summary
    from dsv4kit.prepare.forms import GRPO

    request, out = _request(args), Path(_needed(args, "out")).absolute()
    data.check(request)
    found = data.prepare(request, out, _python(args), lambda line: print(line, flush=True))
    for line in summary.lines(found["form"], found["unit"], found["files"], found["overlap"]):
        print(line)
    if request.form == GRPO and request.data_source and (problem := reward_problem(request.data_source)):
        print(f"note: {problem}")
    files = {"TRAIN_FILE": "train", "TEST_FILE": "test"}
    made = {name: str(out / f"{split}.parquet") for name, split in files.items() if split in found["files"]}
    print(f"{out}: `{hints.command('submit', HW='...', RECIPE=request.form, **made)}` uses it")
    return 0


def _request(args: argparse.Namespace) -> Request:
    from dsv4kit.config.values import split_pair
    from dsv4kit.prepare.data import named_or_file
    from dsv4kit.prepare.work import TEST, TRAIN, Request

    data = _needed(args, "data")
    name = named_or_file(data)
    files = {} if name else {TRAIN: [os.path.abspath(data)]}
    if args.test is not None:
        if name:
            raise UserError(f"TEST={args.test}: goes with a file of your own; {name} has its own test data or none")
        files[TEST] = [os.path.abspath(args.test)]
    return Request(
        "",
        _needed(args, "format"),
        name,
        os.path.abspath(args.from_) if args.from_ else None,
        files,
        dict(split_pair(word, "COLUMNS") for text in args.columns for word in text.split(",") if word),
        args.data_source,
        args.answer_after,
        args.instruction,
        _count(args, "seed", 0) if args.seed is not None else 1,
        _count(args, "rows", 1) if args.rows is not None else None,
        _count(args, "test_rows", 0) if args.test_rows is not None else 0,
        bool(args.keep_duplicates),
        os.path.abspath(args.tokenizer) if args.tokenizer else None,
        os.path.abspath(args.chat_template_file) if args.chat_template_file else None,
        _count(args, "max_tokens", 1) if args.max_tokens is not None else None,
    )


def _needed(args: argparse.Namespace, name: str) -> str:
    value: str | None = getattr(args, name)
    if not value:
        instance = hints.command("prepare data", DATA="gsm8k", FORMAT="grpo", OUT="data/gsm8k")
        raise UserError(f"{name.upper()} is not set; for instance: {instance}")
    return value


def _count(args: argparse.Namespace, name: str, least: int) -> int:
    text: str = getattr(args, name)
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) >= least):
        raise UserError(f"{name.upper()}={text!r}: not a whole number of {least} or more")
    return int(text)


def _python(args: argparse.Namespace) -> list[str]:
    """The Python that does the work: the one that is named, else the CPU runtime's, which needs no GPU."""
    from dsv4kit.sandbox.runtime import runtime_python

    if args.with_python:
        return [args.with_python]
    try:
        return [str(runtime_python(install=False))]
    except UserError as missing:
        raise UserError(f"{missing}; or WITH_PYTHON=PROGRAM, one that has pyarrow, datasets, transformers") from None
