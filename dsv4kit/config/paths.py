"""Where the kit's own files lie. Imports nothing, so that every verb may ask."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SITES = ROOT / "slurm" / "sites"
