"""Whether a site's Slurm takes `sbatch --segment`, which keeps groups of nodes within a rack."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4kit.config.site import Site

# With topology/block; 22.05 refuses a script that has it.
_SINCE = (24, 5)


def asks_for_segment(site: Site) -> bool:
    """Whether the scripts for this site have `--segment`, where a number of nodes is good for it."""
    return site.slurm.block_topology and knows_segment(site.slurm.version)


def knows_segment(version: str | None) -> bool:
    """Whether a Slurm of that version has `--segment`; one that is not known has not."""
    return version is not None and tuple(map(int, version.split(".")[:2])) >= _SINCE
