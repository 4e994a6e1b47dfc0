"""The pipeline layout of a run, made and checked by the planner, which knows the model's shape."""

from __future__ import annotations

from dsv4kit.config.schema import Settings


def pipeline_layout(settings: Settings) -> str | None:
    """The layout string, the user's or a generated one; None where there is no pipeline or no shape to go by.

    Raises UserError for a string, or a parallel split, that breaks a rule.
    """
    from dsv4kit.plan.counted.checks import check
    from dsv4kit.plan.counted.layout import check as check_layout
    from dsv4kit.plan.counted.shards import layout_of, rules_of
    from dsv4kit.plan.from_settings import question

    asked = question(settings)
    if asked is None:
        return settings.parallel.actor.layout
    check(asked)
    if asked.parallel.pipeline == 1 and asked.layout is None:
        return None
    layout = layout_of(asked)
    check_layout(layout, rules_of(asked))
    return layout
