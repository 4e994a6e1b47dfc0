"""The plan of a resolved profile at a site."""

from __future__ import annotations

from dsv4kit.config.schema import Settings
from dsv4kit.plan.core import Plan, evaluate
from dsv4kit.plan.fitted.site_constants import coefficients_for
from dsv4kit.plan.from_settings import question


def plan_of(settings: Settings, site_name: str, placed: bool = False) -> Plan | None:
    """The plan, with the site's own constants where it has any; None where there is nothing to plan with (`question`).

    `placed` is Question's. Raises UserError where the settings break a rule of `counted.checks`.
    """
    asked = question(settings)
    if asked is None:
        return None
    site = coefficients_for(site_name)
    return evaluate(asked._replace(placed=placed), site.coefficients, site.points)
