"""The planner's own rules: the parallel split and the pipeline layout, which Megatron and vLLM refuse when they start.

A model without a known shape, or hardware without GPUs, has neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dsv4kit.errors import UserError
from dsv4kit.feasibility.case import Case, Refusal
from dsv4kit.feasibility.run_layout import pipeline_layout
from dsv4kit.plan.counted import checks
from dsv4kit.plan.from_settings import question

_LAYOUT = "parallel.actor.layout"


def of_model(case: Case) -> Iterator[Refusal]:
    """Splits that go into no number of nodes."""
    asked = question(case.settings)
    if asked is not None:
        yield from _in_settings(case, checks.of_model(asked))


def of_nodes(case: Case) -> Iterator[Refusal]:
    """Splits that do not go into these nodes."""
    asked = question(case.settings)
    if asked is not None:
        yield from _in_settings(case, checks.of_nodes(asked))


def _in_settings(case: Case, found: Iterable[checks.Broken]) -> Iterator[Refusal]:
    for broken in found:
        yield case.refusal(broken.key, broken.value, broken.reason, broken.instead)


def virtual_stages(case: Case) -> Iterator[Refusal]:
    """Neither the planner's formulas nor the generated layout know more than one stage per rank."""
    for prefix in ("actor_rollout_ref.actor.megatron", "engine"):
        key = f"{prefix}.virtual_pipeline_model_parallel_size"
        if case.verl(key) is not None:
            why = "virtual stages are not planned for, and the layout the kit passes on has none"
            yield case.refusal(f"verl.{key}", case.verl(key), why, "leave it out")


def layout(case: Case) -> Iterator[Refusal]:
    """The layout string, the user's or the generated one."""
    asked = question(case.settings)
    if asked is None or next(checks.broken(asked), None):
        return
    try:
        pipeline_layout(case.settings)
    except UserError as error:
        written = case.settings.parallel.actor.layout
        yield Refusal(_LAYOUT, written, case.sources.get(_LAYOUT, "") if written else "", str(error))
