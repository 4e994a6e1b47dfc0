"""`dsv4kit sandbox`: a real Slurm cluster on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4kit.sandbox.cluster import Sandbox


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verbs below `sandbox`."""
    verbs = parser.add_subparsers(dest="sandbox_verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.add_argument("--name", default="default", help="which sandbox (default: %(default)s)")
        return added

    up = verb("up", "bring the cluster up; does nothing when it is up already")
    up.add_argument("--nodes", type=int, default=4, help="number of nodes (default: %(default)s)")
    up.add_argument("--gpus-per-node", type=int, default=1, help="fake GPUs per node (default: %(default)s)")
    up.add_argument("--cpus-per-node", type=int, default=8, help="CPUs a node claims (default: %(default)s)")
    up.add_argument("--memory-mb", type=int, default=0, help="MiB a node claims (default: a share of this machine's)")
    up.add_argument(
        "--share",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="directory below /tmp, /run or /dev/shm that all nodes see; may be repeated",
    )
    down = verb("down", "take the cluster down, and end what runs on it; logs and job numbers stay")
    down.add_argument("--wipe", action="store_true", help="remove logs and job numbers too")
    status = verb("status", "show nodes and their state")
    status.add_argument("--json", action="store_true", help="machine-readable")
    execute = verb("exec", "run a command on a node: exec NODE -- COMMAND...")
    execute.add_argument("node")
    execute.add_argument("command", nargs=argparse.REMAINDER, help="after --; exits with its exit code")
    verb("kill-node", "power a node off").add_argument("node")
    verb("start-node", "power a node on").add_argument("node")
    partition = verb("partition", "cut a node's network")
    partition.add_argument("node")
    partition.add_argument("--heal", action="store_true", help="connect it again")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb; returns the exit code."""
    import json

    from dsv4kit.sandbox.cluster import Sandbox, SandboxSpec

    if args.sandbox_verb == "up":
        spec = SandboxSpec(
            name=args.name,
            nodes=args.nodes,
            gpus_per_node=args.gpus_per_node,
            cpus_per_node=args.cpus_per_node,
            memory_mb=args.memory_mb,
        )
        print(Sandbox.up(spec, share=args.share).status().table())
        return 0
    if args.sandbox_verb == "down":
        for line in _ending(Sandbox.load(args.name)):
            print(line, flush=True)
        found = Sandbox.take_down(args.name, wipe=args.wipe)
        print(f"sandbox {args.name}: " + ("taken down" if found else "nothing to take down"))
        return 0
    sandbox = Sandbox.require(args.name)
    if args.sandbox_verb == "status":
        status = sandbox.status()
        print(json.dumps(status.as_dict(), indent=2) if args.json else status.table())
        return 0 if status.state == "up" else 1
    if args.sandbox_verb == "exec":
        sys.stdout.flush()
        code = sandbox.exec(args.node, _command(args.command)).returncode
        return code if code >= 0 else 128 - code
    if args.sandbox_verb == "kill-node":
        sandbox.kill_node(args.node)
    elif args.sandbox_verb == "start-node":
        sandbox.start_node(args.node)
    else:
        sandbox.partition(args.node, up=args.heal)
    return 0


def _ending(sandbox: Sandbox | None) -> list[str]:
    """A line for each run (or job of another kind) that goes down with the sandbox."""
    from dsv4kit.errors import UserError
    from dsv4kit.launch.run_dir import name_of_job
    from dsv4kit.launch.slurm import Slurm

    if sandbox is None or not sandbox.alive:
        return []
    try:
        jobs = Slurm(sandbox.client_env).unfinished()
    except UserError:  # take it down even if its Slurm does not answer
        return []
    return [f"ends {name_of_job(name)}: {', '.join(states)}" for name, states in sorted(jobs.items())]


def _command(words: list[str]) -> list[str]:
    """The command after NODE, without the `--` before it; what looks like an option there was meant for us."""
    command = words[1:] if words[:1] == ["--"] else words
    if not command or (command is words and command[0].startswith("-")):
        from dsv4kit.errors import UserError

        raise UserError("usage: dsv4kit sandbox exec [--name NAME] NODE -- COMMAND...")
    return command
