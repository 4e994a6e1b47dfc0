"""Messages name commands that their reader can type."""

from collections.abc import Iterator

import pytest

from dsv4kit import hints
from dsv4kit.cli import variables


@pytest.fixture(autouse=True)
def not_by_make() -> Iterator[None]:
    yield
    hints.called_through_make(False)


def test_a_command_is_named_as_the_reader_calls_the_kit() -> None:
    assert hints.command("logs", RUN="a", SEGMENT=2, FOLLOW=1) == "dsv4kit logs --run a --segment 2 --follow"
    assert hints.command("sandbox up") == "dsv4kit sandbox up"
    hints.called_through_make(True)
    assert hints.command("logs", RUN="a", SEGMENT=2, FOLLOW=1) == "make logs RUN=a SEGMENT=2 FOLLOW=1"
    assert hints.command("sandbox up") == ".venv/bin/dsv4kit sandbox up"


def test_the_targets_are_those_of_the_table() -> None:
    assert variables.BY_VERB.keys() == hints.TARGETS.keys()
