"""`dsv4kit`: one verb per thing a user does. Verbs import what they need when they run, so that --help is quick."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from dsv4kit import __version__
from dsv4kit.cli import variables
from dsv4kit.cli.arguments import Parser
from dsv4kit.errors import UserError

_VERBS = ("plan", "doctor", "submit", "status", "logs", "resume", "cancel", "profiles", "sandbox")


# Pydantic otherwise looks through every installed distribution for plugins, 40 ms at each start.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(prog="dsv4kit", description="DeepSeek-V4 post-training on Slurm clusters.")
    parser.add_argument("--version", action="version", version=f"dsv4kit {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for verb in _VERBS:
        importlib.import_module(f"dsv4kit.cli.{verb}").add_parser(subparsers)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parses and runs; raises UserError for what the user got wrong."""
    words = list(arguments)
    if words[:1] == ["--make"]:  # the Makefile: `--make VERB`, with its variables in the environment
        words = [words[1], *variables.options_from_make(words[1], os.environ), *words[2:]]
    args = build_parser().parse_args(words)
    status: int = importlib.import_module(f"dsv4kit.cli.{args.verb}").run(args)
    return status


def main() -> int:
    """The console script."""
    try:
        return run(sys.argv[1:])
    except UserError as error:
        print(f"dsv4kit: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `dsv4kit logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        print(f"dsv4kit: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
        return UserError.exit_code


if __name__ == "__main__":
    sys.exit(main())
