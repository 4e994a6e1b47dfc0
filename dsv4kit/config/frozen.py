"""Settings as a `run.yaml` keeps them, also one of an earlier kit."""

from __future__ import annotations

from typing import Any

from dsv4kit.config.schema import Settings

# Settings there once were, that nothing read: section and key.
_RETIRED = (("hardware", "cores_per_node"), ("hardware", "scratch_gb"), ("schedule", "nodes_multiple_of"))


def frozen_settings(tree: Any) -> Settings:
    """The settings of a run. Raises ValueError for what no kit has written."""
    if not isinstance(tree, dict):
        raise ValueError("not the settings of a run")
    tree = {key: dict(section) if isinstance(section, dict) else section for key, section in tree.items()}
    for section, key in _RETIRED:
        if isinstance(tree.get(section), dict):
            tree[section].pop(key, None)
    return Settings.model_validate(tree)
