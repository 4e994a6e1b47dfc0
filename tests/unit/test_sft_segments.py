"""SFT's steps and epochs; the plugin in verl's own trainer is tested end to end (tests/e2e/test_sft.py)."""

import pytest

from dsv4kit.plugin.sft_segments import at_epoch_end


@pytest.mark.parametrize(("step", "steps_per_epoch", "end"), [(0, 4, False), (3, 4, False), (4, 4, True), (8, 4, True)])
def test_the_last_step_of_an_epoch(step: int, steps_per_epoch: int, end: bool) -> None:
    assert at_epoch_end(step, steps_per_epoch) is end
