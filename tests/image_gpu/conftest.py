"""One storage for all of them: the packages are installed once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab import Container, Lab, missing


@pytest.fixture(scope="session")
def lab() -> Lab:
    if why := missing():
        pytest.exit(why, returncode=2)
    made = Lab()
    made.build_packages()
    return made


@pytest.fixture(scope="module")
def container(lab: Lab) -> Iterator[Container]:
    """Shared; a test that changes something in it puts it back."""
    with lab.container() as made:
        yield made
