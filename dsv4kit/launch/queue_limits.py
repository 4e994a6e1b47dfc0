"""How many jobs one may have in the queue, as far as the cluster says so: associations, QOS, the controller itself."""

from __future__ import annotations

import contextlib
import getpass
import re
from collections.abc import Iterator
from typing import NamedTuple

from dsv4kit.config.site import Site
from dsv4kit.errors import UserError
from dsv4kit.launch.slurm import Slurm


class QueueLimit(NamedTuple):
    """Most jobs in the queue, and what says so."""

    jobs: int
    of: str


def found(slurm: Slurm, site: Site, partition: str) -> list[QueueLimit]:
    """The limits that can be seen, the strictest first; none is no proof that there are none."""
    limits = [*_of_controller(slurm)]
    with contextlib.suppress(UserError):  # no accounting, or it does not answer
        limits += _of_accounting(slurm, site, partition)
    return sorted(limits)


def _of_controller(slurm: Slurm) -> Iterator[QueueLimit]:
    """All users' jobs together."""
    try:
        shown = slurm.run("scontrol", "show", "config")
    except UserError:
        return
    if limit := re.search(r"^MaxJobCount\s*=\s*(\d+)\s*$", shown, re.MULTILINE):
        yield QueueLimit(int(limit[1]), "MaxJobCount of the cluster")


def _of_accounting(slurm: Slurm, site: Site, partition: str) -> Iterator[QueueLimit]:
    user = getpass.getuser()
    columns = "user,account,partition,maxsubmit,grpsubmit,defaultqos"
    qos = {site.slurm.qos} if site.slurm.qos else set()
    for row in _rows(slurm, 6, "assoc", f"user={user}", f"format={columns}"):
        _, account, only_in, *limits, default_qos = row
        if row[0] != user or (site.slurm.account or account) != account or (only_in or partition) != partition:
            continue
        yield from _limits(limits, f"account {account}")
        if default_qos and not site.slurm.qos:
            qos.add(default_qos)
    shown = slurm.record("PartitionName", "scontrol", "show", "partition", "-o", partition)
    qos |= {name for name in [shown.get("QoS", "N/A")] if name != "N/A"}
    if not qos:
        return
    names = ",".join(sorted(filter(None, qos)))
    for name, *limits in _rows(slurm, 3, "qos", names, "format=name,maxsubmitpu,grpsubmit"):
        if name in qos:
            yield from _limits(limits, f"QOS {name}")


def _rows(slurm: Slurm, fields: int, *question: str) -> Iterator[list[str]]:
    """The answer's lines of so many fields; a notice of the site has another number of them."""
    for line in slurm.run("sacctmgr", "-nP", "show", *question).splitlines():
        if len(values := line.split("|")) == fields:
            yield values


def _limits(values: list[str], of: str) -> Iterator[QueueLimit]:
    for value, name in zip(values, ("MaxSubmitJobs", "GrpSubmitJobs"), strict=True):
        if value.isdigit():
            yield QueueLimit(int(value), f"{name} of {of}")
