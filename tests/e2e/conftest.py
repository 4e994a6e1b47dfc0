"""One sandbox for all end-to-end tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from user import Kit

from dsv4kit.sandbox.cluster import Sandbox


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    if os.geteuid() != 0:
        pytest.skip("the sandbox needs root")
    made = Kit(tmp_path_factory.mktemp("e2e"))
    yield made
    Sandbox.take_down("default", root=made.root / "sandboxes")
