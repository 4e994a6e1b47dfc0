"""What the user chose, resolved once: hardware, model, recipe, site, settings, and the image that would be used.

`plan`, `submit`, `doctor` and `image verify` use the same selection, so that none of them answers for another site,
another verl or other settings than the next.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dsv4kit import hints
from dsv4kit.cli.variables import SELECTION, SETTINGS
from dsv4kit.config.values import parse_value, split_pair
from dsv4kit.errors import UserError

if TYPE_CHECKING:
    from dsv4kit.config.loading import Override, Resolved
    from dsv4kit.config.site import Site
    from dsv4kit.feasibility.case import Case, ImageFacts


class Selection(NamedTuple):
    """The choice; `image` is None where the site has none, or where nothing here can look into it."""

    hardware: str
    model: str
    recipe: str
    site: Site
    resolved: Resolved
    image: ImageFacts | None

    def case(self) -> Case:
        """What the rules of `feasibility` look at."""
        from dsv4kit.feasibility.case import Case

        return Case(self.resolved.settings, self.resolved.sources, self.site, self.image)


def selection(args: argparse.Namespace) -> Selection:
    """The choice of a verb that takes SELECTION, IMAGE and all settings."""
    from dsv4kit.config.loading import load_site
    from dsv4kit.launch import site_choice

    chosen = _chosen(args)
    site = load_site(chosen["site"])
    if args.image:
        site = site_choice.in_image(site, args.image)
    site = site_choice.queued(site, {name: getattr(args, name.lower(), None) for name in site_choice.QUEUE})
    image = image_of(site)
    resolved = _resolved(chosen, image, overrides_of(args))
    return Selection(chosen["hw"], chosen["model"], chosen["recipe"], site, resolved, image)


def image_of(site: Site) -> ImageFacts | None:
    """What can be known here of the site's image."""
    if site.container.image is None or not os.path.exists(site.container.image):
        return None
    from dsv4kit.image import fit

    return fit.seen(site.container.image)


def _resolved(chosen: dict[str, str], image: ImageFacts | None, given: Sequence[Override]) -> Resolved:
    """The settings; the image decides which verl it is that is told something."""
    from dsv4kit.config.loading import Override, load_settings

    decided = []
    if image is not None:
        from dsv4kit.image import fit

        if verl := fit.verl_of(image):
            decided.append(Override("engine.verl", verl, "the image's manifest"))
    return load_settings(chosen["hw"], chosen["model"], chosen["recipe"], [*decided, *given])


def _chosen(args: argparse.Namespace) -> dict[str, str]:
    """Hardware, model, recipe and site: named, or the hardware's own."""
    from dsv4kit.config.loading import hardware_defaults, names

    if not args.hw:
        instance = hints.command(args.verb, HW="cpu" if args.verb == "submit" else "h100")
        raise UserError(f"HW is not set; known: {', '.join(names('hardware'))}; for instance: {instance}")
    defaults = hardware_defaults(args.hw)
    chosen = {"hw": args.hw}
    for variable in SELECTION[1:]:
        key = variable.name.lower()
        value = getattr(args, key) or defaults.get(key)
        if not value:
            raise UserError(f"{variable.name} is not set, and HW={args.hw} has no default for it")
        chosen[key] = value
    return chosen


def overrides_of(args: argparse.Namespace) -> list[Override]:
    """What the user set, in the order in which it counts: variables, then SET, then VERL."""
    from dsv4kit.config.loading import Override

    found = []
    for variable in SETTINGS:
        text = getattr(args, variable.name.lower())
        if text is not None and variable.setting:
            value = _listed(text, variable.separator) if variable.listed else text
            found.append(Override(variable.setting, value, f"{variable.name}={text}"))
    for word in args.set:
        key, text = split_pair(word, "SET")
        found.append(
            Override(key, None if text == "null" else parse_value(text) if text[:1] in "[{" else text, f"SET {key}")
        )
    for word in args.verl:
        key, text = split_pair(word, "VERL")
        found.append(Override(f"verl.{key}", parse_value(text), f"VERL {key}"))
    return found


def _listed(text: str, separator: str | None) -> object:
    """A list as people write it: `[a,b]`, or its items with `separator` between them."""
    value = parse_value(text)
    if isinstance(value, list):
        return value
    return [part.strip() for part in text.split(separator)] if separator else [text]
