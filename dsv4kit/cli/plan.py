"""`dsv4kit plan`: what fits, how big, how long, before any node-hour."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB

if TYPE_CHECKING:
    from dsv4kit.plan.core import Plan
    from dsv4kit.plan.counted.inputs import Question
    from dsv4kit.plan.fitted.site_constants import SiteConstants
    from dsv4kit.plan.levers import Lever

_NO_PLAN = "nothing to plan: a toy model, or hardware without GPUs, needs no plan; submit it as it is"

# As submit refuses what cannot work.
_IMPOSSIBLE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = "What fits, how big, how long. Exit code 3: no fit."
    add_variables(parser, BY_VERB["plan"])


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 3 where it does not fit."""
    if args.calibrate:
        return _calibrate(args.calibrate, args.site)
    asked, site_name = _question(args)
    if asked is None:
        print('{"verdict": null}' if args.json else _NO_PLAN)
        return 0
    from dsv4kit.plan.fitted.site_constants import coefficients_for

    site = coefficients_for(site_name)
    return _search(asked, site, args.json) if args.search else _plan(asked, site, args.json, args.explain)


def _plan(asked: Question, site: SiteConstants, as_json: bool, with_formulas: bool) -> int:
    from dsv4kit.plan.core import evaluate

    plan = evaluate(asked, site.coefficients, site.points)
    if as_json:
        import json

        from dsv4kit.plan.shown import as_json as form

        print(json.dumps(form.as_json(plan, _levers(plan)), indent=2))
    else:
        from dsv4kit.plan.shown.table import render

        print(render(plan, _levers(plan) if plan.verdict.verdict != "fit" or with_formulas else ()))
        if with_formulas:
            from dsv4kit.plan.shown.explain import explain

            print("\n" + explain(plan))
    return 0 if plan.verdict.fits else _IMPOSSIBLE


def _levers(plan: Plan) -> tuple[Lever, ...]:
    from dsv4kit.plan.levers import levers

    return levers(plan)


def _search(asked: Question, site: SiteConstants, as_json: bool) -> int:
    from dsv4kit.errors import UserError
    from dsv4kit.plan.counted.checks import check
    from dsv4kit.plan.search import candidate, search

    found = search(asked, site.coefficients)
    try:  # what is asked for may be illegal: that is a reason to search
        check(asked)
        now = candidate(asked, site.coefficients)
    except UserError:
        now = None
    if as_json:
        import json

        from dsv4kit.plan.shown.as_json import candidates_json

        print(json.dumps({"candidates": candidates_json(found)}, indent=2))
    else:
        from dsv4kit.plan.shown.table import render_search

        print(render_search(found, now))
    return 0 if any(candidate.verdict != "no" for candidate in found) else _IMPOSSIBLE


def _question(args: argparse.Namespace) -> tuple[Question | None, str | None]:
    from dsv4kit.cli.submit import overrides_of
    from dsv4kit.config.loading import hardware_defaults, load_settings, load_site, names
    from dsv4kit.errors import UserError
    from dsv4kit.launch.segment_option import asks_for_segment
    from dsv4kit.plan.from_settings import question

    if not args.hw:
        raise UserError(f"HW is not set; known: {', '.join(names('hardware'))}; for instance: make plan HW=h100")
    defaults = hardware_defaults(args.hw)
    model, recipe = args.model or defaults.get("model"), args.recipe or defaults.get("recipe")
    for name, value in (("MODEL", model), ("RECIPE", recipe)):
        if not value:
            raise UserError(f"{name} is not set, and HW={args.hw} has no default for it")
    site = load_site(args.site) if args.site else None
    resolved = load_settings(args.hw, str(model), str(recipe), overrides_of(args))
    asked = question(resolved.settings)
    if asked and site:
        asked = asked._replace(placed=asks_for_segment(site))
    return asked, site.name if site else defaults.get("site")  # a file's name is not the site's


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
