"""Where the kit keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$DSV4KIT_CACHE, else $XDG_CACHE_HOME/dsv4kit, else ~/.cache/dsv4kit."""
    if own := os.environ.get("DSV4KIT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4kit"
