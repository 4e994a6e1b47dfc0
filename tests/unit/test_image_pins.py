"""Digests and commits that no release knows: recorded in one file, looked up by one command."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dsv4kit.cli.main import main
from dsv4kit.errors import UserError
from dsv4kit.image import commits, pins, registry
from dsv4kit.image import stack as stack_module
from dsv4kit.image.context import write_context
from dsv4kit.image.stack import GitSource, stacks

DIGEST, OTHER = f"sha256:{'12' * 32}", f"sha256:{'34' * 32}"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "pins.yaml"
    path.write_text(f"# A comment.\npro-grpo:\n  base: {DIGEST}\n  VERL_SHA: null\nflash-sft:\n  base: null\n")
    monkeypatch.setattr(pins, "FILE", path)
    stacks.cache_clear()
    yield path
    stacks.cache_clear()


def test_the_releases_own_pins_are_of_its_stacks_and_digests_of_both_architectures() -> None:
    assert set(pins.recorded()) <= set(stacks())
    assert stacks()["pro-grpo"].base.digest == pins.recorded()["pro-grpo"]["base"]


def test_what_is_recorded_is_used_and_what_is_given_goes_before_it(file: Path, tmp_path: Path) -> None:
    pins.record("pro-grpo", {"VERL_SHA": "a" * 40})
    stacks.cache_clear()
    context = write_context("h100", tmp_path / "a", {})
    assert context.base_image == f"nvidia/cuda:13.0.2-devel-ubuntu24.04@{DIGEST}"
    assert context.build_args["VERL_SHA"] == "a" * 40
    assert f"ARG VERL_SHA={'a' * 40}\n" in context.dockerfile.read_text()
    given = {"BASE_IMAGE": f"nvidia/cuda:13.0.2-devel-ubuntu24.04@{OTHER}", "VERL_SHA": "b" * 40}
    other = write_context("h100", tmp_path / "b", given)
    assert (other.base_image, other.build_args["VERL_SHA"]) == tuple(given.values())


def test_recording_changes_its_line_alone(file: Path) -> None:
    before = file.read_text()
    pins.record("pro-grpo", {"VERL_SHA": "a" * 40})
    assert file.read_text() == before.replace("VERL_SHA: null", f"VERL_SHA: {'a' * 40}")
    pins.record("flash-sft", {"base": OTHER})
    pins.record("new", {"base": OTHER})
    assert pins.recorded() == {
        "pro-grpo": {"base": DIGEST, "VERL_SHA": "a" * 40},
        "flash-sft": {"base": OTHER},
        "new": {"base": OTHER},
    }


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (DIGEST, "latest", r"pro-grpo.base='latest': sha256: and 64 digits of 0-9 and a-f, or null"),
        ("VERL_SHA: null", "VERL_SHA: main", r"pro-grpo.VERL_SHA='main': a full commit sha, 40 digits"),
        ("VERL_SHA: null", "VLER_SHA: null", r"pro-grpo.VLER_SHA: no variable of that stack"),
        (f"  base: {DIGEST}\n  VERL_SHA: null", "  - x", r"pro-grpo: expected keys and values"),
    ],
)
def test_a_mistake_in_it_is_one_line(file: Path, old: str, new: str, said: str) -> None:
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(UserError, match=rf"^containers/pins.yaml: {said}"):
        stack_module.stacks()


class Registry(BaseHTTPRequestHandler):
    """As docker's hub answers: a token for anybody, then the digest."""

    def do_HEAD(self) -> None:
        if self.headers.get("Authorization") != "Bearer anybody":
            host = self.headers["Host"]
            self.send_response(401)
            self.send_header(
                "WWW-Authenticate", f'Bearer realm="http://{host}/token",service="r",scope="repository:a:pull"'
            )
        elif self.path == "/v2/library/a/manifests/1.0" and "image.index" in self.headers["Accept"]:
            self.send_response(200)
            self.send_header("Docker-Content-Digest", DIGEST)
        else:
            self.send_response(404)
        self.end_headers()

    def do_GET(self) -> None:
        good = "service=r" in self.path and "scope=repository" in self.path
        self.send_response(200 if good else 400)
        self.end_headers()
        self.wfile.write(json.dumps({"token": "anybody"}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_a_registry_is_asked_as_anybody(host: str) -> None:
    assert registry.ask(f"{host}/library/a:1.0", scheme="http") == DIGEST
    with pytest.raises(OSError, match="404"):
        registry.ask(f"{host}/library/b:1.0", scheme="http")


@pytest.mark.parametrize("program", registry.TOOLS)
def test_a_tool_that_is_there_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    (tmp_path / program).write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\necho {OTHER}\n')
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert registry.digest("host.invalid/a:1.0") == (OTHER, program)
    assert "host.invalid/a:1.0" in (tmp_path / "said").read_text()


def test_without_an_answer_three_tools_are_named_with_their_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError) as error:
        registry.digest(f"{host}/library/a:1.0")  # which speaks no TLS
    line = str(error.value)
    assert "\n" not in line
    assert re.search(r"skopeo: not installed; crane: not installed; docker: not installed; the registry itself: ", line)
    assert f"skopeo inspect --format={{{{.Digest}}}} docker://{host}/library/a:1.0; crane digest {host}" in line


def git(directory: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *who, "-C", directory, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def upstream(tmp_path: Path) -> tuple[Path, list[str]]:
    """A repository and the shas of its five commits, oldest first."""
    path = tmp_path / "upstream"
    path.mkdir()
    git(path, "init", "-q")
    made = []
    for number in range(5):
        git(path, "commit", "-q", "--allow-empty", "-m", f"commit {number}")
        made.append(git(path, "rev-parse", "HEAD"))
    return path, made


def source(*contains: str) -> GitSource:
    return GitSource(
        url="https://host.invalid/x", variable="X_SHA", contains=list(contains), role="install", reason="test"
    )


def test_the_first_commit_with_all_that_is_asked_for_is_found_whatever_came_later(
    upstream: tuple[Path, list[str]],
) -> None:
    path, shas = upstream
    found = commits.find(source(shas[3][:7], shas[1][:7]), str(path))
    assert (found.sha, found.subject) == (shas[3], "commit 3")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.date)
    assert commits.find(source(), str(path)).sha == shas[4]


def test_where_none_of_them_has_the_others_it_is_the_newest_that_has_all(upstream: tuple[Path, list[str]]) -> None:
    path, shas = upstream
    git(path, "checkout", "-q", "-b", "side", shas[2])
    git(path, "commit", "-q", "--allow-empty", "-m", "aside")
    aside = git(path, "rev-parse", "HEAD")
    git(path, "checkout", "-q", "main")
    git(path, "merge", "-q", "--no-ff", "-m", "merged", "side")
    assert commits.find(source(shas[3], aside), str(path)).subject == "merged"


def test_a_branch_without_it_is_refused(upstream: tuple[Path, list[str]]) -> None:
    path, shas = upstream
    with pytest.raises(UserError, match=r"upstream: its main branch is without 0bd668c"):
        commits.find(source("0bd668c"), str(path))
    git(path, "checkout", "-q", "-b", "side", shas[2])
    git(path, "commit", "-q", "--allow-empty", "-m", "aside")
    aside = git(path, "rev-parse", "HEAD")
    git(path, "checkout", "-q", "main")
    with pytest.raises(UserError, match=f"its main branch is without {aside}"):
        commits.find(source(aside), str(path))


def test_one_command_finds_and_records(
    file: Path, upstream: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, shas = upstream

    def run(*words: str) -> int:
        stacks.cache_clear()
        monkeypatch.setattr("sys.argv", ["dsv4kit", "image", "pins", *words])
        return main()

    asked: list[str] = []
    monkeypatch.setattr(registry, "digest", lambda image: asked.append(image) or (OTHER, "crane"))
    real = commits.find
    monkeypatch.setattr(commits, "find", lambda found: real(source(shas[2]), str(path)))
    assert run("--hw", "gb200") == 0
    assert pins.recorded()["pro-grpo"] == {"base": DIGEST, "VERL_SHA": shas[2]}
    assert asked == []  # recorded already
    assert run("--hw", "gb200", "--again") == 0
    assert asked == ["docker.io/nvidia/cuda:13.0.2-devel-ubuntu24.04"]
    assert pins.recorded()["pro-grpo"]["base"] == OTHER
    assert "commit it, and everybody builds the same" in capsys.readouterr().out
    assert run("--hw", "cpu") == 0
    assert "nothing to look up" in capsys.readouterr().out
