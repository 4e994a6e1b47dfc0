"""Where the kit keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

from dsv4kit.errors import UserError


def cache_dir() -> Path:
    """$DSV4KIT_CACHE, else $XDG_CACHE_HOME/dsv4kit, else ~/.cache/dsv4kit."""
    if own := os.environ.get("DSV4KIT_CACHE"):
        return Path(own)
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a container with a user id of its own, which no passwd knows
        raise UserError("HOME is not set, and this user has no home; DSV4KIT_CACHE=<directory> does without") from None
    return base / "dsv4kit"
