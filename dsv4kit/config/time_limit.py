"""Slurm's notation for a time limit."""

from __future__ import annotations

import re

_FORMS = (
    r"(?P<minutes>\d+)",
    r"(?P<minutes>\d+):(?P<seconds>\d+)",
    r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)",
    r"(?P<days>\d+)-(?P<hours>\d+)",
    r"(?P<days>\d+)-(?P<hours>\d+):(?P<minutes>\d+)",
    r"(?P<days>\d+)-(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)",
)
_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def seconds(text: str) -> int:
    """The limit in seconds. Raises ValueError for what sbatch would not read as a limit above zero."""
    for form in _FORMS:
        if match := re.fullmatch(form, text, re.ASCII):
            total = sum(_SECONDS[unit] * int(value) for unit, value in match.groupdict().items())
            if total > 0:
                return total
    raise ValueError("not a time limit; Slurm reads 90 (minutes), 4:00:00, 1-12:00:00 and the like")


def checked(text: str) -> str:
    """`text` itself, if it is a time limit."""
    seconds(text)
    return text
