"""Data sets that are known by name: where they are, and what of a row is the question and what the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class NamedSet(NamedTuple):
    """One data set of the hub.

    `splits`: the hub's split -> the file it becomes (train or test). `data_source` decides verl's reward
    (`utils/reward_score/__init__.py`). `answer_after`: the answer is what stands behind the last of these marks.
    `solutions`: its answers are worked out, so that SFT has something to learn from.
    """

    repository: str
    config: str | None
    splits: Mapping[str, str]
    data_source: str
    columns: Mapping[str, str]
    answer_after: str | None = None
    instruction: str | None = None
    solutions: bool = False


# For copies with plain questions: verl's reward for these looks for `Answer:` in the last 300 characters.
_LAST_LINE = 'Reason step by step. Let the last line be "Answer:" and the answer alone.'

BY_NAME: Mapping[str, NamedSet] = {
    "gsm8k": NamedSet(
        "openai/gsm8k",
        "main",
        {"train": "train", "test": "test"},
        "openai/gsm8k",
        {"question": "question", "answer": "answer"},
        answer_after="####",
        # verl's reward looks for `#### NUMBER` in the last 300 characters of the response.
        instruction='Reason step by step and end with the final number after "####".',
        solutions=True,
    ),
    # Rows in verl's form already, each of 17 thousand a hundred times: duplicates are dropped.
    "dapo-math-17k": NamedSet(
        "BytedTsinghua-SIA/DAPO-Math-17k", "default", {"train": "train"}, "math_dapo", {}, instruction=_LAST_LINE
    ),
    # 30 problems, in verl's form and 32 times each; for validation only.
    "aime-2024": NamedSet(
        "BytedTsinghua-SIA/AIME-2024", "default", {"train": "test"}, "aime2024", {}, instruction=_LAST_LINE
    ),
}
