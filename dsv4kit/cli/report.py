"""`dsv4kit report`: one page about a run, or about what two runs have otherwise."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.errors import UserError, nearest

if TYPE_CHECKING:
    from dsv4kit.launch.state import RunState
    from dsv4kit.run.directory import RunDir

_FORMATS = ("html", "md", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = (
        "Write what a run did into one file: curves, times, node-hours, memory, ends. It goes into the run's directory"
        " as report.html; md and json go to the terminal. With two runs: what differs."
    )
    parser.add_argument("name", nargs="?", metavar="RUN", help="as --run")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="as --with")
    add_variables(parser, BY_VERB["report"])


def run(args: argparse.Namespace) -> int:
    """Writes it, and says where."""
    from dsv4kit.cli.runs import chosen_name
    from dsv4kit.launch.run_dir import find_run
    from dsv4kit.report import written
    from dsv4kit.report.gather import gather

    form = args.format or "html"
    if form not in _FORMATS:
        raise UserError(f"FORMAT={form!r}: allowed: {', '.join(_FORMATS)}{nearest(form, _FORMATS)}")
    one = find_run(chosen_name(args))
    with_ = args.other if args.other is not None else getattr(args, "with")
    if with_ is None:
        text = getattr(written, _WRITERS[form])(gather(one))
    else:
        if form == "json":
            raise UserError("FORMAT='json': of one run at a time; two are compared as html or md")
        pair = gather(one), gather(find_run(with_))
        text = written.comparison_as_html(*pair) if form == "html" else written.comparison_as_markdown(*pair)
    if args.out is not None:
        _write(Path(args.out), text)
    elif form != "html":
        sys.stdout.write(text)
    elif with_ is not None:
        _write(Path.cwd() / f"{one.name}-{with_}.html", text)
    else:
        written.keep(one, text)
        print(one.report_file)
    return 0


_WRITERS = {"html": "as_html", "md": "as_markdown", "json": "as_json"}


def _write(path: Path, text: str) -> None:
    from dsv4kit.run.files import write_text

    write_text(path, text)
    print(path)


def written_at_the_end(run: RunDir, state: RunState) -> str | None:
    """Writes the report of a run that is over and has none since its last attempt; where, or None.

    The nodes have no plotting library, so whoever looks first after the end writes it. It never fails who looks.
    """
    newest = max(
        (path.stat().st_mtime for attempt in run.attempts() if (path := attempt.outcome_file).exists()), default=0
    )
    try:
        if not state.over or not newest or (run.report_file.exists() and run.report_file.stat().st_mtime >= newest):
            return None
        from dsv4kit.report import written
        from dsv4kit.report.gather import gather

        written.keep(run, written.as_html(gather(run)))
    except Exception as error:
        print(f"dsv4kit: no report was written: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return str(run.report_file)
