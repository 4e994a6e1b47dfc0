"""Whether verl takes the keys it would be told: those the kit sets itself, and those its configuration tree knows."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4kit.config.loading import source_of
from dsv4kit.errors import UserError
from dsv4kit.feasibility.case import Case, Refusal
from dsv4kit.feasibility.run_layout import pipeline_layout
from dsv4kit.verl_keys import composed, overrides

# Stand in for what a run gets when it is submitted; no rule depends on them.
NOT_SET = "/not-set"


def _told(case: Case) -> overrides.Overrides:
    return overrides.traced(
        case.settings,
        run_name="run",
        model_path=NOT_SET,
        data_dir=NOT_SET,
        run_dir=NOT_SET,
        kit_dir=NOT_SET,
        layout=_layout(case),
    )


def _layout(case: Case) -> str | None:
    """The pipeline layout; None where there is none, which is another rule's affair (`planner_rules`)."""
    try:
        return pipeline_layout(case.settings)
    except UserError:
        return None


def clashes(case: Case) -> Iterator[Refusal]:
    """A raw key may not contradict the setting that checks and plan go by (raised by `overrides`)."""
    if not case.submitted:
        _told(case)
    yield from ()


def known_keys(case: Case) -> Iterator[Refusal]:
    """All keys composed with verl's own tree (raised by `compose`).

    What ships is composed by the tests; here only where the user gave a raw key, or a value that Hydra may read as
    something else than itself. The tree is not even looked at otherwise, which a plan has no time for.
    """
    if case.submitted:
        return
    told = _told(case)
    by_hand = any(
        source.startswith(("SET ", "VERL ")) and key.partition(".")[0] == "verl" for key, source in case.sources.items()
    )
    lacking = case.features.removed & told.pairs.keys()
    if by_hand or lacking or not all(map(composed.is_plain, told.pairs.values())):
        render(case, told)
    yield from ()


def render(case: Case, told: overrides.Overrides) -> list[str]:
    """verl's overrides as argv of the driver. Raises UserError for what its tree does not take."""
    from dsv4kit.verl_keys import compose

    settings = case.settings
    origins = {key: source_of(setting, case.sources) or settings.profile for key, setting in told.settings.items()}
    tree = compose.Tree(settings.recipe.config_name, case.features.added, case.features.removed)
    return tree.render(told.pairs, origins)
