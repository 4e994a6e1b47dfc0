"""Where nodes should stand: on racks with one NVLink domain, which `--segment` keeps expert groups inside a rack.

Slurm's block topology gives out nodes in segments of N within a block; N has to divide the node count (Slurm
`sbatch.1`). An expert group and a rollout replica stay whole when their node counts divide N.
"""

from __future__ import annotations

import math

from dsv4kit.plan.counted.inputs import Question


def slurm_segment(q: Question) -> int | None:
    """The largest N for `--segment`; 0 where nothing fits, None on hardware without racks of one NVLink domain."""
    gpus = q.parallel.gpus_per_node
    rack = q.hardware.nvlink_domain_gpus // gpus
    if rack <= 1:
        return None
    groups = [q.parallel.expert, q.rollout.gpus if q.rollout and q.rollout.expert > 1 else 1]
    unit = math.lcm(*(-(-group // gpus) for group in groups))
    legal = [n for n in range(unit, min(rack, q.parallel.nodes) + 1, unit) if q.parallel.nodes % n == 0]
    return max(legal, default=0)
