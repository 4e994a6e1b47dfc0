"""A reward that a tiny, randomly initialised model learns within a dozen steps: the share of digits in its answer.

For verl's own reward loop::

    reward.custom_reward_function.path = pkg://dsv4kit.plugin.toy_reward
    reward.custom_reward_function.name = compute_score

Dense (almost every group of samples has a spread, so GRPO has a gradient from step 1) and cheap (no model, no parser).
"""

from __future__ import annotations

from typing import Any

_DIGITS = frozenset("0123456789")


def compute_score(
    data_source: str = "", solution_str: str = "", ground_truth: Any = None, extra_info: Any = None, **_: Any
) -> float:
    """The share of ASCII digits among the characters of `solution_str`, 0.0 to 1.0; 0.0 for an empty answer."""
    return sum(character in _DIGITS for character in solution_str) / len(solution_str) if solution_str else 0.0
