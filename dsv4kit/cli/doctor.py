"""`dsv4kit doctor`: is this cluster ready for this run?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.text_table import aligned

if TYPE_CHECKING:
    from dsv4kit.launch.doctor_visit import Visit
    from dsv4kit.launch.submission import Submission
    from dsv4kit.run.node_files import NodeReport

_COLUMNS = ("node", "memory (GB)", "GPUs", "/dev/shm", "scratch", "IMEX", "InfiniBand", "inside", "to next", "problems")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = (
        "Looks at the cluster from the login node; with --nodes, sends a short job that has so many nodes examine"
        " themselves in the run's container. Exit status 1 where something is wrong."
    )
    add_variables(parser, BY_VERB["doctor"])
    parser.set_defaults(run=None, force=None, from_=None)  # what only a submission has


def run(args: argparse.Namespace) -> int:
    """Shows the findings, then the nodes."""
    from dsv4kit.cli.submit import request
    from dsv4kit.launch.doctor import examine

    submission = request(args)
    if submission.site.name == "sandbox":
        from dsv4kit.cli.local import on_sandbox

        submission = on_sandbox(submission, args.torch_index, install=args.nodes is not None)
    if args.json:
        return _as_json(submission, visit=args.nodes is not None)
    well = True
    for finding in examine(submission):
        print(f"{finding.level:8} {finding.topic}: {finding.text}", flush=True)
        well = well and finding.level != "problem"
    if args.nodes is None:
        print("the nodes themselves: NODES=2 sends a short job to two of them")
        return 0 if well else 1
    return 0 if _visit(submission) and well else 1


def _as_json(submission: Submission, visit: bool) -> int:
    """Findings, and the nodes' reports where they were visited; what happens meanwhile goes to stderr."""
    from dsv4kit.launch.doctor import examine
    from dsv4kit.launch.doctor_visit import send
    from dsv4kit.launch.run_dir import runs_root

    findings = [vars(finding) for finding in examine(submission)]
    shown: dict[str, Any] = {"findings": findings}
    problem = None
    if visit:
        sent = send(submission, runs_root() / ".doctor")
        state = sent.wait(lambda line: print(line, flush=True, file=sys.stderr))
        problem = sent.problem()
        shown |= {"job": sent.job_id, "state": state, "nodes": [vars(report) for report in sent.reports()]}
        shown |= {"measured": sent.bandwidth(), "problem": problem, "enroot": [asdict(look) for look in sent.hosts()]}
    print(json.dumps(shown, indent=1))
    return 1 if problem or any(finding["level"] == "problem" for finding in findings) else 0


def _visit(submission: Submission) -> bool:
    """Sends the job, waits, and shows what the nodes said."""
    from dsv4kit.launch.doctor_visit import send
    from dsv4kit.launch.run_dir import runs_root

    sent = send(submission, runs_root() / ".doctor")
    print(f"\njob {sent.job_id} on {sent.nodes} nodes; {sent.run.path}", flush=True)
    state = sent.wait(lambda line: print(line, flush=True))
    reports, measured = sent.reports(), sent.bandwidth()
    print(f"\n{node_table(reports, measured)}")
    for line in summary(reports, measured):
        print(line)
    room = _room(submission, sent)
    if problem := sent.problem():
        print(f"problem  {problem} (job {state})")
    return room and not problem


def _room(submission: Submission, sent: Visit) -> bool:
    """What the nodes have for enroot, seen from outside of the container; whether it is well."""
    from dsv4kit.image import contents
    from dsv4kit.launch import enroot_room

    image, looks = submission.site.container.image, sent.hosts()
    unpacked = contents.unpacked_bytes(image) if image and looks else None
    found = [finding for look in looks for finding in enroot_room.findings(look, unpacked)]
    for well, text in found:
        print(f"{'ok' if well else 'problem':8} {text}")
    return all(well for well, _ in found)


def node_table(reports: Sequence[NodeReport], measured: dict[str, Any]) -> str:
    """One line per node; rates in GB/s, sizes in GB."""
    rows = [_COLUMNS, *(_row(report, measured.get("nodes", {}).get(report.host, {})) for report in reports)]
    return "\n".join(aligned(rows))


def _row(report: NodeReport, rates: dict[str, float | None]) -> tuple[str, ...]:
    facts: dict[str, Any] = report.facts
    memory = " + ".join(f"{size:.0f}" for size in facts.get("memory_gb", {}).values())
    ports = facts.get("infiniband", {}).values()
    active = sum("ACTIVE" in port for port in ports)
    fabric = facts.get("fabric", "")
    return (
        report.host,
        memory or f"{report.memory_available_gib:.0f}",
        str(facts.get("gpus", "")),
        f"{facts.get('shm_free_gb', 0):.0f}",
        f"{facts.get('scratch_free_gb', 0):.0f}",
        f"{facts.get('imex_channels', 0)} {fabric}".strip(),
        f"{active} of {len(ports)} up" if ports else "none",
        _rate(rates.get("inside_gb_s")),
        _rate(rates.get("to_next_gb_s")),
        "; ".join(report.problems) or "none",
    )


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def summary(reports: Sequence[NodeReport], measured: dict[str, Any]) -> list[str]:
    """What is to be said about all nodes together."""
    lines = []
    versions = [report.facts.get("versions", {}) for report in reports]
    if versions and all(found == versions[0] for found in versions) and isinstance(versions[0], dict):
        lines.append(f"versions: {', '.join(f'{name} {v}' for name, v in versions[0].items()) or 'none found'}")
    elif versions:
        lines.append("warning  the nodes have different versions of what trains; see nodes/*.json")
    pythons = sorted({str(report.facts["python"]) for report in reports if report.facts.get("python")})
    if pythons:
        lines.append(f"{'warning  ' if len(pythons) > 1 else ''}Python of the nodes: {', '.join(pythons)}")
    if "all_reduce_gb_s" in measured:
        lines.append(
            f"over {measured['ranks']} ranks ({measured['device']}): all-reduce {measured['all_reduce_gb_s']:.3g} GB/s,"
            f" all-to-all {measured['all_to_all_gb_s']:.3g} GB/s"
        )
    return lines
