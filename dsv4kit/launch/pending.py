"""Why a job waits, in plain words.

The reasons are those of squeue's man page ("JOB REASON CODES"); one that is not listed here is shown as Slurm says it.
"""

from __future__ import annotations

import re

_WORDS = {
    "None": "Slurm has not looked at the job yet",
    "Resources": "waits until enough nodes are free",
    "Priority": "jobs with a higher priority come first",
    "Dependency": "waits for the segment before to end",
    "DependencyNeverSatisfied": "the job it waits for can never end as it has to; cancel and resume the run",
    "BeginTime": "is not to start before a set time",
    "JobHeldUser": "is held by its user; `scontrol release` lets it go",
    "JobHeldAdmin": "is held by an administrator",
    "Reservation": "waits for its reservation to begin",
    "ReservationDeleted": "its reservation is gone",
    "ReqNodeNotAvail": "nodes it needs are down, drained or reserved",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": (
        "nodes it needs are down, drained or reserved for others"
    ),
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition starts no jobs now",
    "PartitionNodeLimit": "asks for more nodes than the partition gives one job",
    "PartitionTimeLimit": "asks for more time than the partition gives one job",
    "BadConstraints": "no node has what it asks for",
    "Cleaning": "Slurm is still clearing away its last start",
    "launch_failed_requeued_held": "could not be started on its nodes, and is held",
    "Licenses": "waits for a licence",
    "NodeDown": "a node it needs is down",
    "AssociationJobLimit": "the account's limit of jobs is reached",
    "AssociationResourceLimit": "the account's limit of resources is reached",
    "AssociationTimeLimit": "the account's time is used up",
    "QOSJobLimit": "the quality of service's limit of jobs is reached",
    "QOSResourceLimit": "the quality of service's limit of resources is reached",
    "QOSTimeLimit": "the quality of service's time is used up",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the quality of service is not valid",
}
# QOSMaxJobsPerUserLimit, AssocGrpNodeLimit, ...: whose limit, on what.
_LIMIT = re.compile(r"(QOS|Assoc)(Max|Grp|Min)?(\w*?)(?:Limit|PerUser|PerAccount|PerJob)*\Z")


def in_words(reason: str) -> str:
    """The reason as squeue shows it (`(Resources)`), for people; Slurm's own word stands behind it."""
    code = reason.strip().removeprefix("(").removesuffix(")")
    if not code:
        return ""
    key = code.replace(" ", "_")
    known = _WORDS.get(key) or _WORDS.get(key.partition(",")[0])
    if known is None and (limit := _LIMIT.match(key)):
        whose = "the quality of service" if limit[1] == "QOS" else "the account"
        known = f"a limit of {whose} is reached"
    return f"{known} ({code})" if known else code
