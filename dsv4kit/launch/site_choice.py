"""A site with what the user named beside it: an image, a partition, nodes to stay away from."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dsv4kit.config import site_values
from dsv4kit.config.loading import Override, validate
from dsv4kit.config.site import Site, SlurmOptions
from dsv4kit.errors import UserError
from dsv4kit.feasibility.site_files import image_problems

# Make variable -> key of the site's `slurm` section.
QUEUE = {"PARTITION": "partition", "QOS": "qos", "ACCOUNT": "account", "EXCLUDE": "exclude", "CHAIN": "chain"}


def queued(site: Site, named: Mapping[str, str | None]) -> Site:
    """The site with the values of `QUEUE` that are given; an empty one leaves it to Slurm."""
    given = {name: text for name, text in named.items() if text is not None}
    if not given:
        return site
    values = {QUEUE[name]: text or None for name, text in given.items()}
    sources = {QUEUE[name]: f"{name}={text}" for name, text in given.items()}
    return site.model_copy(update={"slurm": validate(SlurmOptions, {**site.slurm.model_dump(), **values}, sources)})


def in_image(site: Site, image: str) -> Site:
    """The site with the image the user names; a relative path is from here."""
    try:
        entered = site.in_image(str(site_values.image(os.path.abspath(image))))
    except ValueError as error:
        raise UserError(f"IMAGE={image!r}: {error}") from None
    for problem in image_problems(os.path.abspath(image), "IMAGE"):
        raise UserError(problem)
    return entered


def of_image(site: Site) -> list[Override]:
    """What the image decides: which verl it is that is told something."""
    if site.container.image is None:
        return []
    from dsv4kit.image import fit

    verl = fit.verl_of(fit.seen(site.container.image))
    return [] if verl is None else [Override("engine.verl", verl, "the image's manifest")]
