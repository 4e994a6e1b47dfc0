"""Slurm's notation for a time limit."""

from __future__ import annotations

import re

_FORMS = (
    r"(?P<minutes>\d{1,9})",
    r"(?P<minutes>\d{1,9}):(?P<seconds>\d{1,9})",
    r"(?P<hours>\d{1,9}):(?P<minutes>\d{1,9}):(?P<seconds>\d{1,9})",
    r"(?P<days>\d{1,9})-(?P<hours>\d{1,9})",
    r"(?P<days>\d{1,9})-(?P<hours>\d{1,9}):(?P<minutes>\d{1,9})",
    r"(?P<days>\d{1,9})-(?P<hours>\d{1,9}):(?P<minutes>\d{1,9}):(?P<seconds>\d{1,9})",
)
# Slurm counts minutes in 32 bits and seconds in a signed 32; it treats more than 68 years as no limit.
_LONGEST_S = 2**31 - 1
_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def seconds(text: str) -> int:
    """The limit in seconds. Raises ValueError for what sbatch would not read as a limit above zero."""
    for form in _FORMS:
        if match := re.fullmatch(form, text, re.ASCII):
            total = sum(_SECONDS[unit] * int(value) for unit, value in match.groupdict().items())
            if 0 < total <= _LONGEST_S:
                return total
    raise ValueError("not a time limit; Slurm reads 90 (minutes), 4:00:00, 1-12:00:00 and the like")


def checked(text: str) -> str:
    """`text` itself, if it is a time limit."""
    seconds(text)
    return text
