"""Bases made on this machine: which image stands for which, and whose keys are believed."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4kit.errors import UserError
from dsv4kit.image import base, engines
from dsv4kit.image.context import without_cache_mounts, write_context


@pytest.mark.parametrize(
    ("image", "local"),
    [
        ("debian:bookworm-slim", "localhost/dsv4kit-base:bookworm-amd64"),
        ("ubuntu:24.04", "localhost/dsv4kit-base:noble-amd64"),
    ],
)
def test_an_image_that_is_made_here_has_a_name_that_says_what_it_is(image: str, local: str) -> None:
    assert base.local_name(image, "x86_64") == local
    assert base.image_of(local) == image


@pytest.mark.parametrize("name", ["nvidia/cuda:13.0.2", "localhost/mine:noble-amd64", "ubuntu:22.04", ""])
def test_any_other_image_is_not_made_here(name: str) -> None:
    assert base.suite_of(name) is None
    assert base.image_of(name) is None


def test_the_mirror_is_this_machines_for_its_own_distribution_only() -> None:
    sources = "deb [arch=amd64] http://mirror.invalid/ubuntu noble main\nURIs: http://other.invalid/debian\n"
    assert base.mirror(sources, "noble") == "http://mirror.invalid/ubuntu"
    assert base.mirror(sources, "bookworm") == "http://other.invalid/debian"
    assert base.mirror("", "noble") == "http://archive.ubuntu.com/ubuntu"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[str]:
    """Serves another package of keys than the known one."""
    file = tmp_path / "served" / "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"somebody else's keys")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *words: object) -> None:
            super().__init__(*words, directory=str(tmp_path / "served"))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_keys_of_ubuntu_are_the_known_ones_or_none(tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: False)
    with pytest.raises(UserError, match=r"^base: http://127\S+\.deb: not the package of keys that is known here$"):
        base._keyring(base._UBUNTU, host, engines.Buildah(tmp_path))
    with pytest.raises(UserError, match=r"^base: http://127\S+/nowhere/\S+: HTTP Error 404"):
        base._keyring(base._UBUNTU, f"{host}/nowhere", engines.Buildah(tmp_path))
    assert not (tmp_path / "keys").exists()


def test_for_an_older_engine_the_cache_mounts_are_gone_and_nothing_else(tmp_path: Path) -> None:
    context = write_context("cpu", tmp_path, {"BASE_IMAGE": "localhost/base:1"})
    before = context.dockerfile.read_text()
    assert "--mount=type=cache" in before
    without_cache_mounts(context)
    text = context.dockerfile.read_text()
    assert "--mount" not in text
    kept = [line for line in before.splitlines() if "unset PIP_NO_CACHE_DIR" not in line]
    assert [line.split(" set -eu")[-1] for line in kept] == [line.split(" set -eu")[-1] for line in text.splitlines()]
