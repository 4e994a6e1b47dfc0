"""Golden files: rendered text that a person reviewed, compared word by word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: the text is that of the file `name`; `--update-golden` writes the file instead."""

    def compare(name: str, text: str) -> None:
        path = HERE / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"{name}: run pytest with --update-golden, then review the new file"
        assert text == path.read_text()

    return compare
