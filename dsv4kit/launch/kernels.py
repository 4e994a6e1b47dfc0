"""What the nodes are told about compiled kernels: where each compiler keeps them, and what they are good for.

A new run begins with those of a run beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from dsv4kit.config.loading import load_yaml
from dsv4kit.config.schema import Settings
from dsv4kit.config.site import Site
from dsv4kit.launch import image_state
from dsv4kit.run import kernels
from dsv4kit.run.directory import RunDir
from dsv4kit.run.node_spec import KernelCaches

_TABLE = Path(__file__).with_name("kernel_caches.yaml")
_GIB = 2**30


def told(settings: Settings, site: Site, python: str) -> KernelCaches | None:
    """None where `kernel_cache.enabled` is off."""
    if not settings.kernel_cache.enabled:
        return None
    table = load_yaml(_TABLE)
    return KernelCaches(
        key=key(settings, site, python),
        variables={name: row["directory"] for name, row in table.items()},
        limit_bytes=int(settings.kernel_cache.limit_gib * _GIB),
        # Without a container it is the user's own home, which jobs and shells write to all the time.
        filled={} if site.container.runtime == "none" else {name: row["home"] for name, row in table.items()},
    )


def key(settings: Settings, site: Site, python: str) -> str:
    """Of all that kernels are compiled for: the packages, the GPU, the shapes that model and recipe bring."""
    image = image_state.now(site)
    of = {
        "packages": list(image) if image else [site.container.image, python],
        "hardware": settings.hardware.name,
        "model": settings.model.name,
        "recipe": settings.recipe.name,
    }
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


def bring(run: RunDir, staging: RunDir, key: str) -> str | None:
    """Links what the run beside `run` has that compiled last for this key; a line that names it, None where none has.

    Hard links, because a bundle is never changed; where there can be none, the first segment compiles as ever.
    """
    others = [
        other
        for other in run.path.parent.glob("*")
        if other != run.path and kernels.bundles(RunDir(other).kernels(key))
    ]
    with contextlib.suppress(OSError):
        latest = max(others, key=lambda other: RunDir(other).kernels(key).stat().st_mtime, default=None)
        if latest is None:
            return None
        own = staging.kernels(key)
        own.mkdir(parents=True)
        for number, bundle in enumerate(kernels.bundles(RunDir(latest).kernels(key))):
            os.link(bundle, kernels.brought(own, number))
        return f"compiled kernels: those of run {latest.name}, which had the same packages, GPU, model and recipe"
    return None
