"""Has a run of few layers proved this site before 64 nodes are asked for? If not: the command of one that would."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping
from pathlib import Path

from dsv4kit import hints, yaml_text
from dsv4kit.config.frozen import frozen_settings
from dsv4kit.config.loading import load_settings, load_yaml, names
from dsv4kit.config.paths import HERE
from dsv4kit.config.schema import Hardware, Settings
from dsv4kit.config.site import Site
from dsv4kit.errors import UserError
from dsv4kit.run import gates, metrics, outcome
from dsv4kit.run.directory import RunDir, runs_below


def suggestion(settings: Settings, site: Site, runs: Path, given: Mapping[str, str]) -> list[str]:
    """Lines for the user; none where nothing is to be proved, or a proxy run below `runs` has proved it.

    `given` are the make variables to repeat in the command: what chooses hardware, recipe and site, and the data.
    """
    proxy = settings.model.proxy
    if proxy is None or settings.hardware.device == "cpu":
        return []
    try:
        shown = load_settings(settings.hardware.name, proxy, settings.recipe.name).settings
    except UserError:  # this hardware has no profile for it
        return []
    if any(_proves(run, settings, site, shown) for run in runs_below(runs)):
        return []
    words = {"HW": settings.hardware.name, "MODEL": proxy, **given, "NODES": str(shown.schedule.nodes)}
    command = " ".join(f"{name}={shlex.quote(value)}" for name, value in words.items())
    image = " with this image" if site.container.image else ""
    return [
        f"no run of four layers has succeeded on {site.name}{image}; one proves image, site and data in minutes:",
        f"make submit {command} MODEL_PATH=...  (`{hints.command('proxy-weights')}` makes its weights)",
    ]


def _proves(run: RunDir, settings: Settings, site: Site, proxy: Settings) -> bool:
    """Whether that is a finished run of a proxy on the same site, kind of hardware and image, by the same recipe.

    Where the recipe generates, rollout and actor must have agreed in each of its steps, as far as `proxy` says.
    """
    try:
        text = run.record_file.read_text(encoding="utf-8")
        if not any(f"name: {name}" in text for name in _proxies()):  # most runs are told apart without reading YAML
            return False
        frozen = yaml_text.parse(text)
        there, at = frozen["settings"], frozen["site"]
        same = (
            there["model"]["name"] in _proxies()
            and there["recipe"]["name"] == settings.recipe.name
            and _family(frozen_settings(there).hardware) == _family(settings.hardware)
            and at["name"] == site.name
            and at["container"]["image"] == site.container.image
        )
    except (OSError, ValueError, TypeError, KeyError):  # not a run of this kit, or a damaged one
        return False
    if not same or all(past.next != outcome.FINISHED for past in outcome.history(run)):
        return False
    if proxy.recipe.launcher != "ray" or proxy.watch.gates.agreement is None:
        return True
    merged = metrics.merge(metrics.read_metrics(attempt.metrics_file) for attempt in run.attempts())
    return gates.proof(proxy.watch.gates.model_dump(), merged).startswith(gates.PROVED)


def _family(hardware: Hardware) -> tuple[int, str | None]:
    """What one image and one set of kernels are for: compute capability without its minor number, and the CPU."""
    return (hardware.sm_architecture or 0) // 10, hardware.cpu_architecture


@functools.cache
def _proxies() -> frozenset[str]:
    """The models that are named as a proxy of another."""
    models = (load_yaml(HERE / "models" / f"{name}.yaml").get("model", {}) for name in names("models"))
    return frozenset(str(model["proxy"]) for model in models if model.get("proxy"))
