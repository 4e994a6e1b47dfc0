"""A commit of a source whose sha no release knows: the first one that has all that it must have."""

from __future__ import annotations

import os
import subprocess
import tempfile
from typing import NamedTuple

from dsv4kit.errors import UserError
from dsv4kit.image.stack import GitSource

_LIMIT_S = 900


class Commit(NamedTuple):
    """A commit by its full sha, with its date and first line."""

    sha: str
    date: str
    subject: str


def find(source: GitSource, url: str | None = None) -> Commit:
    """Of the commits it must contain the one that has the others behind it, so that everybody finds the same.

    Where it must contain none, or none of them has all others, the newest of its main branch. `url`: a mirror. History
    alone is fetched, a few megabytes. Raises UserError with git's words.
    """
    place = url or source.url
    with tempfile.TemporaryDirectory(prefix="dsv4kit-") as directory:
        _git("clone", "--quiet", "--bare", "--filter=tree:0", "--single-branch", place, directory, about=place)
        full = []
        for commit in source.contains:
            if not _has(directory, "HEAD", commit):
                raise UserError(f"{place}: its main branch is without {commit}")
            full.append(_git("-C", directory, "rev-parse", f"{commit}^{{commit}}", about=place))
        chosen = next(sha for sha in [*full, "HEAD"] if all(_has(directory, sha, other) for other in full))
        return Commit(*_git("-C", directory, "log", "-1", "--format=%H%n%cs%n%s", chosen, about=place).split("\n", 2))


def _has(directory: str, sha: str, other: str) -> bool:
    done = subprocess.run(["git", "-C", directory, "merge-base", "--is-ancestor", other, sha], capture_output=True)
    return done.returncode == 0


def _git(*words: str, about: str) -> str:
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(["git", *words], env=env, capture_output=True, text=True, timeout=_LIMIT_S)
    except FileNotFoundError:
        raise UserError("git: not installed; it finds commits") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{about}: no answer in {_LIMIT_S} s") from None
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UserError(f"{about}: git: {said[-1]}")
    return done.stdout.strip()
