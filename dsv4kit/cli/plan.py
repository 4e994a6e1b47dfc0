"""`dsv4kit plan`: what fits, how big, how long, before any node-hour."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB

if TYPE_CHECKING:
    from dsv4kit.feasibility.case import Case
    from dsv4kit.plan.core import Plan
    from dsv4kit.plan.counted.inputs import Question
    from dsv4kit.plan.fitted.site_constants import SiteConstants
    from dsv4kit.plan.levers import Lever

Take = Callable[[Mapping[str, object]], str]

_NO_PLAN = "nothing to plan: a toy model or hardware without GPUs needs no plan; submit it without one"

_REFUSED = "as it stands this is refused: "

# As submit refuses what cannot work.
_IMPOSSIBLE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "What fits, how big, how long. Exit code 3: no fit."
    add_variables(parser, BY_VERB["plan"])


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 3 where it does not fit. What `submit` would refuse is refused here, in the same line.

    Where only the profile's split does not go into the nodes, another one is planned, beside that line.
    """
    from dsv4kit.errors import UserError

    try:
        if args.forget:
            return _forget(args.forget, _site_name(args.site), args.json)
        if args.calibrate:
            return _calibrate(args.calibrate, _site_name(args.site), bool(args.dry_run), args.json)
        if args.dry_run:
            raise UserError("DRY_RUN: goes with CALIBRATE=RUN_DIR; a plan without it changes nothing anyway")
        return _compare(args) if args.compare else _one(args)
    except UserError as error:
        if args.json:
            _print_json({"verdict": None, "refused": str(error)})
        raise


def _one(args: argparse.Namespace) -> int:
    from dsv4kit.cli.selection import selection
    from dsv4kit.feasibility.refusals import refuse
    from dsv4kit.launch.segment_option import asks_for_segment
    from dsv4kit.plan.fitted.site_constants import coefficients_for
    from dsv4kit.plan.from_settings import question

    chosen = selection(args)
    case = chosen.case()
    asked = question(chosen.resolved.settings)
    if asked is None:
        refuse(case)
        print('{"verdict": null}' if args.json else _NO_PLAN)
        return 0
    asked = asked._replace(placed=asks_for_segment(chosen.site))
    site = coefficients_for(chosen.site.name)
    if args.search:
        return _search(asked, case, site, args.json)
    if args.min_nodes:
        return _min_nodes(asked, case, site, args.json)
    refused = _refused_split(case)
    if refused is None:
        refuse(case)
        return _plan(asked, case, site, args.json, args.explain, _taking(args))
    return _other_split(asked, case, site, refused, args.json)


def _refused_split(case: Case) -> str | None:
    """The refusal, where another split of these nodes may cure it."""
    from dsv4kit.feasibility.refusals import of_the_layout

    found = of_the_layout(case)
    return found.line if found else None


def _taking(args: argparse.Namespace) -> Take:
    """The submission as it was asked for, with some variables set besides."""
    from dsv4kit import hints
    from dsv4kit.cli.variables import FREE, IMAGE, SELECTION, SETTINGS

    given: dict[str, object] = {}
    for variable in (*SELECTION, IMAGE, *SETTINGS, *FREE):
        value = getattr(args, variable.dest)
        if value:
            given[variable.name] = tuple(value) if variable.many else value

    def take(changed: Mapping[str, object]) -> str:
        words = (*given.get("SET", ()), *changed.get("SET", ()))  # type: ignore[misc]
        return hints.command("submit", **{**given, **changed, **({"SET": words} if words else {})})

    return take


def _plan(asked: Question, case: Case, site: SiteConstants, as_json: bool, with_formulas: bool, take: Take) -> int:
    from dsv4kit.plan.core import evaluate

    plan = evaluate(asked, site.coefficients, site.points)
    least = None if plan.verdict.fits else _least(asked, case, site)
    if as_json:
        from dsv4kit.plan.shown import as_json as form
        from dsv4kit.plan.shown.recommended import recommended

        found = _levers(plan, case)
        told = [{"what": x.what, "command": take(x.variables)} for x in recommended(plan, found)]
        _print_json(form.as_json(plan, found) | {"least_nodes": least, "recommended": told})
    else:
        from dsv4kit.plan.shown.table import render

        shown = _levers(plan, case) if plan.verdict.verdict != "fit" or with_formulas else ()
        print(render(plan, shown, least, take))
        if with_formulas:
            from dsv4kit.plan.shown.explain import explain

            print("\n" + explain(plan))
    return 0 if plan.verdict.fits else _IMPOSSIBLE


def _other_split(asked: Question, case: Case, site: SiteConstants, refused: str, as_json: bool) -> int:
    """The best that can be done with these nodes and levers, beside why the profile's own split cannot be."""
    from dsv4kit.errors import UserError
    from dsv4kit.feasibility.refusals import allows
    from dsv4kit.plan.proposals import as_set, changes
    from dsv4kit.plan.search import search

    found = search(asked, site.coefficients, allows(case), 1, site.points, with_levers=False)
    if not found:
        raise UserError(refused)
    plan = found[0].plan
    changed = changes(asked, plan.question)
    least = None if plan.verdict.fits else _least(asked, case, site)
    if as_json:
        from dsv4kit.plan.shown import as_json as form

        _print_json(form.as_json(plan) | {"refused": refused, "set": changed, "least_nodes": least})
    else:
        from dsv4kit.plan.shown.table import render

        print(f"{_REFUSED}{refused}")
        print(f'planned instead: SET="{as_set(changed)}"')
        print(render(plan, () if plan.verdict.verdict == "fit" else _levers(plan, case), least))
    return _IMPOSSIBLE


def _least(asked: Question, case: Case, site: SiteConstants) -> int | None:
    """The least count of more nodes that would do."""
    from dsv4kit.feasibility.refusals import allows
    from dsv4kit.plan.node_counts import least_nodes

    return least_nodes(asked, site.coefficients, allows(case), asked.parallel.nodes + 1)


def _min_nodes(asked: Question, case: Case, site: SiteConstants, as_json: bool) -> int:
    from dsv4kit.feasibility.refusals import allows
    from dsv4kit.plan.node_counts import least_nodes
    from dsv4kit.plan.proposals import as_set, changes
    from dsv4kit.plan.search import search

    least = least_nodes(asked, site.coefficients, allows(case))
    found = None
    if least is not None:
        there = asked._replace(parallel=asked.parallel._replace(nodes=least))
        found = next(iter(search(there, site.coefficients, allows(case), 1, site.points, with_levers=False)), None)
    changed = changes(asked, found.question) if found else {}
    if as_json:
        _print_json({"least_nodes": least, "verdict": found.verdict if found else "no", "set": changed})
    elif found is None:
        print(f"no number of nodes of {asked.hardware.name} that was tried fits with these levers")
    else:
        print(f"{least} nodes of {asked.hardware.name} is the least that fits: {found.verdict}")
        print(f'SET="{as_set(changed)}"' if changed else "the profile as it stands")
    return 0 if found else _IMPOSSIBLE


def _compare(args: argparse.Namespace) -> int:
    """One line for each hardware and node count."""
    from dsv4kit.cli.selection import selection
    from dsv4kit.errors import UserError
    from dsv4kit.feasibility.refusals import allows, refusals
    from dsv4kit.plan.core import evaluate
    from dsv4kit.plan.fitted.site_constants import coefficients_for
    from dsv4kit.plan.from_settings import question
    from dsv4kit.plan.search import search
    from dsv4kit.plan.shown.comparison import Compared, as_rows, render

    rows = []
    words = args.compare.split(",")
    # One model and recipe for all of them: what was named, or what the first hardware has.
    same = _of_the_first(args, args.hw or words[0].strip().partition(":")[0])
    for word in words:
        hardware, _, nodes = word.strip().partition(":")
        own = argparse.Namespace(**{**vars(args), **same, "hw": hardware, "nodes": nodes or args.nodes})
        try:
            chosen = selection(own)
            case = chosen.case()
            asked = question(chosen.resolved.settings)
            if asked is None:
                raise UserError(_NO_PLAN)
            site = coefficients_for(chosen.site.name)
            if next(refusals(case), None) is None:
                rows.append(Compared(word, evaluate(asked, site.coefficients, site.points)))
                continue
            if (refused := _refused_split(case)) is None:
                from dsv4kit.feasibility.refusals import refuse

                refuse(case)
            found = search(asked, site.coefficients, allows(case), 1, site.points, with_levers=False)
            plan = found[0].plan if found else None
            rows.append(Compared(word, plan, refused or "", other_split=True))
        except UserError as error:
            if not hardware or ":" not in word:
                raise
            rows.append(Compared(word, None, str(error)))
    if args.json:
        _print_json({"compared": as_rows(rows)})
    else:
        print(render(rows))
    return 0 if any(row.plan and row.plan.verdict.fits for row in rows) else _IMPOSSIBLE


def _of_the_first(args: argparse.Namespace, hardware: str) -> dict[str, str]:
    from dsv4kit.config.loading import hardware_defaults
    from dsv4kit.errors import UserError

    try:
        defaults = hardware_defaults(hardware)
    except UserError:
        if ":" not in args.compare:
            raise
        return {}
    return {name: getattr(args, name) or defaults[name] for name in ("model", "recipe") if name in defaults}


def _print_json(content: object) -> None:
    import json

    print(json.dumps(content, indent=2))


def _levers(plan: Plan, case: Case) -> tuple[Lever, ...]:
    from dsv4kit.feasibility.refusals import allows
    from dsv4kit.plan.levers import levers

    return levers(plan, allows(case))


def _search(asked: Question, case: Case, site: SiteConstants, as_json: bool) -> int:
    from dsv4kit.errors import UserError
    from dsv4kit.feasibility.refusals import allows, beyond_search, refusals
    from dsv4kit.plan.core import evaluate
    from dsv4kit.plan.search import compared, search

    if (lasting := beyond_search(case)) is not None:
        raise UserError(lasting.line)
    refused = next(refusals(case), None)
    found = search(asked, site.coefficients, allows(case), points=site.points)
    if refused is not None and not found:
        raise UserError(refused.line)
    now = evaluate(asked, site.coefficients, site.points) if refused is None else None
    found = compared(found, now)
    if as_json:
        from dsv4kit.plan.shown.as_json import candidates_json

        _print_json({"candidates": candidates_json(found, asked)})
    else:
        from dsv4kit.plan.shown.search_table import render_search

        print(render_search(found, now, asked))
    return 0 if any(candidate.verdict != "no" for candidate in found) else _IMPOSSIBLE


def _site_name(site: str | None) -> str | None:
    from dsv4kit.config.loading import load_site

    return load_site(site).name if site and site.endswith((".yaml", ".yml")) else site


def _calibrate(run_dir: str, site: str | None, dry_run: bool, as_json: bool) -> int:
    from pathlib import Path

    from dsv4kit.config.frozen import frozen_settings
    from dsv4kit.errors import UserError
    from dsv4kit.launch.run_dir import read_record
    from dsv4kit.plan.fitted.calibration import calibrate, shape_of
    from dsv4kit.plan.fitted.measured import Shape
    from dsv4kit.plan.from_settings import question
    from dsv4kit.plan.shown import fit_table
    from dsv4kit.run.directory import RunDir

    run = RunDir(Path(run_dir))
    record = read_record(run)
    try:
        settings = frozen_settings(record["settings"])
        there = str(record["site"]["name"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{run.record_file}: not that of a run of this kit") from None
    asked = question(settings)
    shape = (
        shape_of(asked)
        if asked
        else Shape(settings.schedule.nodes, "sft" not in settings.recipe.module, settings.schedule.save_freq)
    )
    found = calibrate(Path(run_dir), asked, shape, settings.hardware.name, site or there, dry_run)
    if as_json:
        _print_json(fit_table.as_json(found))
        return 0
    print(fit_table.render(found))
    if dry_run:
        print(f"\nnothing was kept; without DRY_RUN it goes into {found.path}")
    else:
        print(f"\nkept in {found.path}: plans for the site {found.site} go by it. To undo: {_undo(found.run)}")
    return 0


def _undo(run: str) -> str:
    from dsv4kit import hints

    return hints.command("plan", FORGET=run)


def _forget(run: str, site: str | None, as_json: bool) -> int:
    from dsv4kit.plan.fitted.calibration import forget

    changed = forget(run, site)
    if as_json:
        _print_json({"forgotten": run, "files": list(map(str, changed))})
    else:
        print("\n".join(f"{path}: nothing of {run} is in it any more" for path in changed))
    return 0
