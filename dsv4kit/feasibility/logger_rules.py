"""Trackers that could not log: verl starts them after the model is loaded, an hour into a large segment."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsv4kit.feasibility.case import Case, Refusal

# verl's loggers that need a package besides verl's own, and its name as packages are listed.
_PACKAGES = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "vemlp_wandb": "volcengine-ml-platform",
    "clearml": "clearml",
    "trackio": "trackio",
}
# Those that ask for a key of their service, with what makes them need none: a variable, and values of it.
_KEYS = {
    "wandb": ("WANDB_MODE", ("offline", "disabled", "dryrun")),
    "swanlab": ("SWANLAB_MODE", ("local", "offline", "disabled")),
    "vemlp_wandb": None,
    "clearml": ("CLEARML_OFFLINE_MODE", ("1", "true")),
}


def in_the_image(case: Case) -> Iterator[Refusal]:
    """A logger whose package the image does not have, where the image tells what it has."""
    packages = case.image.manifest.get("packages") if case.image and case.image.manifest else None
    if not isinstance(packages, dict) or not packages:
        return
    there = {_normal(str(name)) for name in packages}
    for logger in case.settings.loggers:
        if _PACKAGES.get(logger, logger) not in there and logger in _PACKAGES:
            why = f"the image has no {_PACKAGES[logger]}: verl would stop after the model is loaded"
            yield case.refusal("loggers", logger, why, "`dsv4kit track` writes the curve afterwards, also without it")


def with_a_key(case: Case) -> Iterator[Refusal]:
    """A logger that needs a key, on a site that gives the job none."""
    if case.site.secrets_file:
        return
    env = {**case.settings.env, **case.site.env}
    for logger in case.settings.loggers:
        if logger not in _KEYS:
            continue
        without = _KEYS[logger]
        if without and env.get(without[0], "").lower() in without[1]:
            continue
        offline = f", or SET=env.{without[0]}={without[1][0]} logs into the run directory" if without else ""
        why = "needs a key, and the site has no secrets_file to read it from"
        yield case.refusal("loggers", logger, why, f"secrets_file of the site names it{offline}")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
