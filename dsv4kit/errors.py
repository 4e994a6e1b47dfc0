"""The one error a user can cause: a single clear line on stderr and exit code 2."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what the user asked for; its text is one line, shown without a traceback.

    The text names the file or variable, the key, the value, what is allowed and the nearest valid name.
    """

    exit_code = 2


def nearest(name: str, valid: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the closest name in `valid`, or `""` where nothing is close."""
    import difflib

    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
