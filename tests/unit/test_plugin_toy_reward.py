"""The toy reward: its values, on hostile text too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4kit.plugin.toy_reward import compute_score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("", 0.0),
        ("42", 1.0),
        ("#### 42", 2 / 7),
        ("no digit", 0.0),
        ("\x00\ufffd\ud800", 0.0),  # what an untrained model writes: control characters, broken UTF-8
        ("٣²①Ⅷ五", 0.0),  # digits to Unicode, not to us
        ("$(rm -rf /); `id` '\" 1", 1 / 22),
        ("1\n2\r\n3", 0.5),
        ("7" * 100_000, 1.0),
    ],
)
def test_score_is_the_share_of_ascii_digits(answer: str, score: float) -> None:
    assert compute_score(solution_str=answer) == pytest.approx(score)


@given(st.text())
def test_score_is_always_a_share(answer: str) -> None:
    score = compute_score(data_source="x", solution_str=answer, ground_truth="1", extra_info={"index": 0})
    assert isinstance(score, float)
    assert 0.0 <= score <= 1.0


def test_takes_what_the_reward_loop_passes_besides() -> None:
    assert compute_score("d", "1a", "1", None, reward_router_address="here", reward_model_tokenizer=None) == 0.5
