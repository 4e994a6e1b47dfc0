"""Commands as a message names them: in the form in which its reader called the kit."""

from __future__ import annotations

import shlex

# The verbs that are targets of the Makefile, and what they are called there.
TARGETS = {
    **{
        verb: verb
        for verb in (
            "submit",
            "plan",
            "doctor",
            "runs",
            "status",
            "report",
            "track",
            "logs",
            "explain",
            "checkpoints",
            "resume",
            "cancel",
            "export",
            "sources",
        )
    },
    "image build": "image",
    "image pins": "pins",
    "prepare data": "data",
    "prepare model": "model",
}

_by_make = False


def called_through_make(yes: bool) -> None:
    """Notes how this process was called; until then, not through make."""
    global _by_make
    _by_make = yes


def command(verb: str, **variables: object) -> str:
    """`make status RUN=x` for whoever calls make, else `dsv4kit status --run x`; make has no path to the program.

    Several values of one variable are a tuple: make takes them as words, the program as so many options.
    """
    words = {
        name: tuple(map(str, value)) if isinstance(value, tuple) else (str(value),) for name, value in variables.items()
    }
    if _by_make and verb in TARGETS:
        given = (f"{name}={shlex.quote(' '.join(values))}" for name, values in words.items())
        return " ".join(["make", TARGETS[verb], *given])
    program = ".venv/bin/dsv4kit" if _by_make else "dsv4kit"
    return " ".join([program, verb, *(_option(name, value) for name, values in words.items() for value in values)])


def _option(name: str, value: str) -> str:
    option = f"--{name.lower().replace('_', '-')}"
    return option if name in ("FOLLOW", "ALL") else f"{option} {shlex.quote(value)}"
