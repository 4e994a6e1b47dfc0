"""`dsv4kit submit`: a profile becomes a run, and its chain of segments goes into the queue."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from dsv4kit import hints
from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.errors import UserError

if TYPE_CHECKING:
    from dsv4kit.launch.submission import Submission


_IMPOSSIBLE = 3

_NEEDED = {
    "MODEL_PATH": "the directory with its weights",
    "TRAIN_FILE": "a parquet file with training data",
    "MEGATRON_LM": "a checkout of Megatron-LM (`dsv4kit sources` says how to get one)",
    "MEGATRON_BRIDGE": "a checkout of Megatron-Bridge (`dsv4kit sources` says how to get one)",
    "TEST_FILE": "a parquet file with validation data (verl reads it at every start)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "Start a run as a chain of Slurm jobs."
    add_variables(parser, BY_VERB["submit"])


def run(args: argparse.Namespace) -> int:
    """Checks everything, then submits, then (on a site that wants it) follows the run to its end."""
    if args.json and not args.dry_run:
        raise UserError("JSON: goes together with DRY_RUN here; `status` has JSON of a run that is submitted")
    submission = request(args)
    submission.check()
    for note in submission.case.data.notes:
        print(f"dsv4kit: data: {note}", file=sys.stderr)
    for note in submission.notes:
        print(f"dsv4kit: image: {note}", file=sys.stderr)
    if submission.missing and not args.dry_run:
        name = submission.missing[0]
        raise UserError(f"{name}: not set; {submission.resolved.settings.model.name} needs {_NEEDED[name]}")
    submission = _with_checkouts(submission)
    if not _plan_allows(submission):
        return _IMPOSSIBLE
    if submission.branch is None:
        _suggest_proxy(submission, args)
    if submission.site.name == "sandbox":
        from dsv4kit.cli.local import on_sandbox

        submission = on_sandbox(submission, args.torch_index, install=not args.dry_run)
    if args.dry_run:
        print(json.dumps(submission.rendered(), indent=1) if args.json else submission.dry_run())
        return 0
    submission.check_cluster()
    settings = submission.resolved.settings
    schedule = settings.schedule
    print(f"run {submission.run.name}: {settings.description}")
    print(
        f"plan: {schedule.steps} steps in {submission.segments} segments of {schedule.segment_steps}"
        f" on {schedule.nodes} nodes, a checkpoint every {schedule.save_freq} steps{_spares(schedule.spare_segments)}"
        f"{_begins(submission)}"
    )
    submission.submit(lambda line: print(line, flush=True))
    print(f"directory: {submission.run.path}")
    if args.follow if args.follow is not None else submission.site.follow:
        from dsv4kit.cli.follow import follow

        return follow(submission.run, submission.slurm)
    print(f"`{hints.command('status', RUN=submission.run.name)}` shows how it goes")
    return 0


def _begins(submission: Submission) -> str:
    branch = submission.branch
    return f"; from step {branch.step} of the run {branch.parent.name}" if branch else ""


def _spares(count: int) -> str:
    return f"; {count} spare segment{'s' if count > 1 else ''} behind them, for those that fail" if count else ""


def _with_checkouts(submission: Submission) -> Submission:
    """With absolute paths of the checkouts; one without DeepSeek-V4 is refused, one at another commit is noted."""
    import dataclasses

    settings = submission.resolved.settings
    if not settings.model.checkouts:
        return submission
    from dsv4kit.image import sources

    stack, env = sources.stack_of(settings.model.checkouts), dict(settings.env)
    for wanted in sources.CHECKOUTS:
        if given := env.get(f"DSV4KIT_{wanted.variable}"):
            env[f"DSV4KIT_{wanted.variable}"] = str(sources.directory(wanted, given))
            if found := sources.difference(wanted, given, stack.git[wanted.package]):
                print(f"dsv4kit: note: {wanted.variable}={given}: {found}", file=sys.stderr)
    made = settings.model_copy(update={"env": env})
    return dataclasses.replace(submission, resolved=submission.resolved._replace(settings=made))


def _plan_allows(submission: Submission) -> bool:
    """Shows the planner's answer; False where it finds the run impossible and the user did not override it."""
    verdict = submission.verdict
    if verdict is None:
        return True
    head = {"fit": "it fits", "tight": "tight", "no": "does not fit"}[verdict.verdict]
    for line in verdict.reasons:
        print(f"dsv4kit: plan: {head}: {line}", file=sys.stderr)
    for line in verdict.warnings:
        print(f"dsv4kit: plan: note: {line}", file=sys.stderr)
    if verdict.fits or submission.forced:
        return True
    print("dsv4kit: plan: nothing submitted; FORCE=1 submits it all the same", file=sys.stderr)
    return False


def _suggest_proxy(submission: Submission, args: argparse.Namespace) -> None:
    """Names the small run that would prove the site, where none has."""
    from dsv4kit.config.loading import hardware_defaults
    from dsv4kit.launch.proxies import suggestion
    from dsv4kit.launch.run_dir import runs_root

    settings, defaults = submission.resolved.settings, hardware_defaults(args.hw)
    given = {"RECIPE": settings.recipe.name, "SITE": args.site or "", "TRAIN_FILE": args.train_file or ""}
    given |= {"TEST_FILE": args.test_file or ""}
    for name, value in list(given.items()):
        if not value or value == defaults.get(name.lower()):
            del given[name]
    for line in suggestion(settings, submission.site, runs_root(), given):
        print(f"dsv4kit: {line}", file=sys.stderr)


def request(args: argparse.Namespace) -> Submission:
    """What the options ask for, before anything is looked at outside of the configuration."""
    from dsv4kit.cli.selection import selection
    from dsv4kit.launch.run_dir import checked_name, runs_root
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.launch.submission import Submission
    from dsv4kit.run.directory import RunDir

    if args.from_ is not None:
        return _branch(args)
    chosen = selection(args)
    name = checked_name(args.run if args.run is not None else _new_name(chosen.resolved.settings.profile))
    return Submission(
        chosen.resolved,
        chosen.site,
        RunDir(runs_root() / name),
        Slurm(),
        chosen.site.python or "python3",
        forced=bool(args.force),
        image=chosen.image,
    )


def _branch(args: argparse.Namespace) -> Submission:
    """A run that begins with another one's checkpoint, with that one's settings where the user names no others."""
    from dsv4kit.cli.selection import image_of, overrides_of
    from dsv4kit.launch import site_choice
    from dsv4kit.launch.branch import Branch
    from dsv4kit.launch.run_dir import checked_name, read_record, runs_root
    from dsv4kit.launch.slurm import Slurm
    from dsv4kit.launch.submission import Submission
    from dsv4kit.run.directory import RunDir

    branch = Branch.named(args.from_)
    site = branch.site(args.site)
    if args.image:
        site = site_choice.in_image(site, args.image)
    site = site_choice.queued(site, {name: getattr(args, name.lower(), None) for name in site_choice.QUEUE})
    overrides = [*(site_choice.of_image(site) if args.image or args.site else []), *overrides_of(args)]
    chosen = {name: getattr(args, name.lower()) for name in ("HW", "MODEL", "RECIPE")}
    resolved = branch.settings(chosen, overrides)
    name = checked_name(args.run if args.run is not None else _new_name(branch.parent.name[:40]))
    return Submission(
        resolved,
        site,
        RunDir(runs_root() / name),
        Slurm(),
        site.python or read_record(branch.parent)["python"],
        forced=bool(args.force),
        image=image_of(site),
        first_step=branch.step,
        branch=branch,
    )


def _new_name(profile: str) -> str:
    import time

    return f"{profile}-{time.strftime('%Y%m%d-%H%M%S')}"
