"""`dsv4kit plan`: what fits, how big, how long, before any node-hour."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB

if TYPE_CHECKING:
    from dsv4kit.feasibility.case import Case
    from dsv4kit.plan.core import Plan
    from dsv4kit.plan.counted.inputs import Question
    from dsv4kit.plan.fitted.site_constants import SiteConstants
    from dsv4kit.plan.levers import Lever

_NO_PLAN = "nothing to plan: a toy model or hardware without GPUs needs no plan; submit it without one"

# As submit refuses what cannot work.
_IMPOSSIBLE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "What fits, how big, how long. Exit code 3: no fit."
    add_variables(parser, BY_VERB["plan"])


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 3 where it does not fit. What `submit` would refuse is refused here, in the same line."""
    if args.calibrate:
        return _calibrate(args.calibrate, args.site)
    from dsv4kit.cli.selection import selection
    from dsv4kit.feasibility.refusals import refuse
    from dsv4kit.launch.segment_option import asks_for_segment
    from dsv4kit.plan.fitted.site_constants import coefficients_for
    from dsv4kit.plan.from_settings import question

    chosen = selection(args)
    case = chosen.case()
    if not args.search:
        refuse(case)
    asked = question(chosen.resolved.settings)
    if asked is None:
        refuse(case)
        print('{"verdict": null}' if args.json else _NO_PLAN)
        return 0
    asked = asked._replace(placed=asks_for_segment(chosen.site))
    site = coefficients_for(chosen.site.name)
    return _search(asked, case, site, args.json) if args.search else _plan(asked, case, site, args.json, args.explain)


def _plan(asked: Question, case: Case, site: SiteConstants, as_json: bool, with_formulas: bool) -> int:
    from dsv4kit.plan.core import evaluate

    plan = evaluate(asked, site.coefficients, site.points)
    if as_json:
        import json

        from dsv4kit.plan.shown import as_json as form

        print(json.dumps(form.as_json(plan, _levers(plan, case)), indent=2))
    else:
        from dsv4kit.plan.shown.table import render

        print(render(plan, _levers(plan, case) if plan.verdict.verdict != "fit" or with_formulas else ()))
        if with_formulas:
            from dsv4kit.plan.shown.explain import explain

            print("\n" + explain(plan))
    return 0 if plan.verdict.fits else _IMPOSSIBLE


def _levers(plan: Plan, case: Case) -> tuple[Lever, ...]:
    from dsv4kit.feasibility.refusals import allows
    from dsv4kit.plan.levers import levers

    return levers(plan, allows(case))


def _search(asked: Question, case: Case, site: SiteConstants, as_json: bool) -> int:
    from dsv4kit.errors import UserError
    from dsv4kit.feasibility.refusals import allows, beyond_search, refusals
    from dsv4kit.plan.search import candidate, search

    if (lasting := beyond_search(case)) is not None:
        raise UserError(lasting.line)
    refused = next(refusals(case), None)
    found = search(asked, site.coefficients, allows(case))
    if refused is not None and not found:
        raise UserError(refused.line)
    now = candidate(asked, site.coefficients) if refused is None else None
    if as_json:
        import json

        from dsv4kit.plan.shown.as_json import candidates_json

        print(json.dumps({"candidates": candidates_json(found, asked)}, indent=2))
    else:
        from dsv4kit.plan.shown.table import render_search

        print(render_search(found, now, asked))
    return 0 if any(candidate.verdict != "no" for candidate in found) else _IMPOSSIBLE


def _calibrate(run_dir: str, site: str | None) -> int:
    from pathlib import Path

    from dsv4kit.config.frozen import frozen_settings
    from dsv4kit.config.loading import load_site
    from dsv4kit.errors import UserError
    from dsv4kit.launch.run_dir import read_record
    from dsv4kit.plan.fitted.calibration import calibrate
    from dsv4kit.plan.from_settings import question
    from dsv4kit.run.directory import RunDir

    run = RunDir(Path(run_dir))
    record = read_record(run)
    path = run.record_file
    try:
        settings = frozen_settings(record["settings"])
        there = str(record["site"]["name"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not that of a run of this kit") from None
    if site and site.endswith((".yaml", ".yml")):
        site = load_site(site).name
    asked = question(settings)
    if asked is None:
        raise UserError(f"{path}: its model has no geometry; there is nothing to fit")
    values, kept = calibrate(Path(run_dir), asked, site or there)
    for name, value in values.items():
        print(f"{name} = {value:.6g}")
    print(f"kept in {kept}; `dsv4kit plan` uses it for the site {site or there}")
    return 0
