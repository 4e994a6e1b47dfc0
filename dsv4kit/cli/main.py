"""`dsv4kit`: one verb per thing a user does. Verbs import what they need when they run, so that --help is quick."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from dsv4kit import __version__, hints
from dsv4kit.cli import variables
from dsv4kit.cli.arguments import Parser
from dsv4kit.errors import UserError
from dsv4kit.run.errors import DamagedFileError

# Verb -> its line in the help. Each is a module of that name here (with _ for -), with `add_arguments` and `run`; only
# the one that is asked for is imported.
VERBS = {
    "plan": "what fits, how big, how long",
    "doctor": "is this cluster ready for a run",
    "submit": "start a run",
    "runs": "show all runs, a line each",
    "status": "show a run",
    "report": "one page about a run: curves, times, cost, memory, ends",
    "track": "a run's curve for TensorBoard, wandb or MLflow",
    "logs": "show a run's log",
    "explain": "what the processes of a running segment are doing now",
    "checkpoints": "the checkpoints of a run, and whether they are complete",
    "resume": "go on with a run",
    "cancel": "end a run",
    "export": "a checkpoint as a directory that vLLM and transformers load",
    "profiles": "list profiles, or show one",
    "schema": "JSON Schema of a settings file, for editors",
    "prepare": "data in verl's columns; whether a model is whole",
    "proxy-weights": "the first layers of a released checkpoint, for a proxy run",
    "sources": "Megatron-LM and Megatron-Bridge at the commits of a stack",
    "image": "container images: what is inside, how they are built",
    "sandbox": "a real Slurm cluster on this machine (needs root)",
}

# A shell has them for other Pythons than this one.
_OF_OTHER_PYTHONS = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONUSERBASE")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(prog="dsv4kit", description="DeepSeek-V4 post-training on Slurm clusters.")
    parser.add_argument("--version", action="version", version=f"dsv4kit {__version__}")
    # With `prog` given, no usage has to be laid out to find it.
    subparsers = parser.add_subparsers(
        dest="verb", metavar="VERB", required=True, parser_class=Parser, prog=parser.prog
    )
    for verb, line in VERBS.items():
        subparsers.add_parser(verb, help=line, arguments=functools.partial(_add_arguments, verb))
    return parser


def _module(verb: str) -> Any:
    return importlib.import_module(f"dsv4kit.cli.{verb.replace('-', '_')}")


def _add_arguments(verb: str, parser: argparse.ArgumentParser) -> None:
    _module(verb).add_arguments(parser)


def run(arguments: Sequence[str]) -> int:
    """Parses and runs; raises UserError for what the user got wrong."""
    words = list(arguments)
    hints.called_through_make(words[:1] == ["--make"])
    if words[:1] == ["--make"]:  # the Makefile: `--make VERB [ACTION]`, with its variables in the environment
        words = [*words[1:], *variables.options_from_make(" ".join(words[1:]), os.environ)]
    for word in words:
        if not word.isascii() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UserError(f"{word!a}: not UTF-8; it could stand neither in a run's files nor in its scripts")
    if not words:
        build_parser().print_help()
        return 2
    args = build_parser().parse_args(words)
    status: int = _module(args.verb).run(args)
    return status


def main() -> int:
    """The console script; it runs isolated (containers/isolate.sh), and so does what it starts."""
    # What imports make lasts: to look for garbage among it every 700 objects costs `plan` a twelfth of its start.
    gc.set_threshold(50_000)
    for name in _OF_OTHER_PYTHONS:
        os.environ.pop(name, None)
    # Who can write into a run directory decides what its jobs run: never everybody. Jobs get the mask from Slurm.
    os.umask(os.umask(0o077) | 0o002)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal that knows no umlauts
    try:
        return run(sys.argv[1:])
    except UserError as error:
        return _say(str(error), error.exit_code)
    except DamagedFileError as error:
        return _say(str(error), UserError.exit_code)
    except BrokenPipeError:  # `dsv4kit logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _say(f"{error.filename2 or error.filename or 'output'}: {error.strerror or error}", UserError.exit_code)
    except Exception as error:
        if os.environ.get("DSV4KIT_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {error}"
        return _say(f"a defect of dsv4kit, please report it: {what} (DSV4KIT_TRACEBACK=1 shows where)", 1)


def _say(message: str, status: int) -> int:
    """One line on stderr, whatever the message quotes."""
    print(f"dsv4kit: {message}".replace("\r", "\\r").replace("\n", "\\n"), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
