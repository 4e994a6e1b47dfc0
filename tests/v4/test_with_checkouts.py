"""Starts the tests of this directory where the checkouts are; says what is missing where they are not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import start


@pytest.mark.skipif(os.environ.get("DSV4KIT_TEST_V4") == "1", reason="started already: the tests run directly")
def test_v4_trains_on_these_checkouts() -> None:
    if missing := start.missing():
        pytest.skip(missing)
    assert start.run(["-q"]) == 0
