"""Repositories that a build takes from another place than their public address: a mirror, a checkout, a tarball.

A mirror's address goes into the build, which fetches the commit there. Checkouts and tarballs are read here, checked,
and put into the build's context: a checkout by its commit, a tarball, which has none, by the tree of its files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsv4kit.errors import UserError
from dsv4kit.image.stack import Fetched

# Nothing of this user's own git changes what is read: filters, line ends, ignored files.
_ENV = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
_LIMIT_S = 1800


def mirrors(given: Mapping[str, str]) -> dict[str, str]:
    """Those of NAME_SOURCE=PLACE that are addresses. Raises UserError for one that a build could not use."""
    found = {}
    for variable, place in given.items():
        if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|[^/\s]+@[^/\s]+:", place):
            continue
        if not re.fullmatch(r"https?://[^\s@\"'`$\\]+", place):
            shown = re.sub(r"//[^@/]*@", "//...@", place)
            raise UserError(
                f"{variable}={shown!r}: an https address without a user's name is wanted (what an engine is told stays"
                " in the image's history, and a build has no keys); or clone it here, and name the directory"
            )
        found[variable] = place
    return found


def put(repository: Fetched, sha: str, place: str, into: Path, contains: Sequence[str] = ()) -> None:
    """The files of a checkout or tarball at `place`, checked, as the directory `into`.

    `contains`: commits that `sha` has to descend from. Raises UserError for anything else than the wanted commit.
    """
    path, what = Path(place).expanduser(), f"{repository.variable}={place!r}"
    if path.is_dir():
        _from_git(repository, sha, path.absolute(), into, contains, what)
    elif path.is_file():
        with tempfile.TemporaryDirectory(prefix="dsv4kit-", dir=into.parent) as directory:
            _from_tarball(repository, sha, path, Path(directory), into, contains, what)
    else:
        raise UserError(f"{what}: no such file or directory; a mirror's address, a checkout or a tarball is wanted")


def _from_git(repository: Fetched, sha: str, path: Path, into: Path, contains: Sequence[str], what: str) -> None:
    if _git("-C", str(path), "rev-parse", "--git-dir").returncode != 0:
        raise UserError(f"{what}: no git repository, so nothing says which commit it is; a tarball of it is checked")
    for commit in contains:
        if _git("-C", str(path), "merge-base", "--is-ancestor", commit, sha).returncode != 0:
            raise UserError(f"{what}: {sha} is without {commit}, or the history is not there to tell (a shallow clone)")
    _git("init", "--quiet", str(into))
    done = _git("-C", str(into), "fetch", "--quiet", "--depth=1", str(path), sha)
    if done.returncode == 0:
        done = _git("-C", str(into), "checkout", "--quiet", "--detach", "FETCH_HEAD")
    if done.returncode != 0:
        raise UserError(f"{what}: {sha} cannot be had from it: {_last(done.stderr)}")
    found = _git("-C", str(into), "rev-parse", "HEAD").stdout.strip()
    if found != sha:
        raise UserError(f"{what}: {found} came out, {sha} is wanted")
    shutil.rmtree(into / ".git")


def _from_tarball(
    repository: Fetched, sha: str, path: Path, directory: Path, into: Path, contains: Sequence[str], what: str
) -> None:
    unpack = ["tar", "-x", "--no-same-owner", "-f", str(path), "-C", str(directory)]
    done = subprocess.run(unpack, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise UserError(f"{what}: not unpacked: {_last(done.stderr)}")
    inside = list(directory.iterdir())
    root = inside[0] if len(inside) == 1 and inside[0].is_dir() else directory
    if (root / ".git").is_dir():
        _from_git(repository, sha, root, into, contains, what)
        return
    if repository.tree is None:
        raise UserError(
            f"{what}: a tarball has no commit, and the tree of {repository.name} at {sha[:12]} is not recorded in"
            " containers/stack.yaml; name a checkout, or pack one with its .git"
        )
    found = tree_of(root)
    if found != repository.tree:
        raise UserError(
            f"{what}: its files are tree {found}, and those of {repository.name} at {sha[:12]} are {repository.tree}"
        )
    shutil.move(root, into)


def tree_of(directory: Path) -> str:
    """What `git write-tree` says of all files below the directory."""
    with tempfile.TemporaryDirectory(prefix="dsv4kit-") as kept:
        _git("init", "--quiet", "--bare", kept)
        options = ["--git-dir", kept, "--work-tree", str(directory), "-c", "core.bare=false"]
        options += ["-c", "core.autocrlf=false", "-c", "core.fileMode=true"]
        for words in (["add", "--all", "--force", "."], ["write-tree"]):
            done = _git(*options, *words, cwd=directory)
            if done.returncode != 0:
                raise UserError(f"{directory}: git {words[0]}: {_last(done.stderr)}")
        return done.stdout.strip()


def _git(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", *words],
            cwd=cwd,
            env={**os.environ, **_ENV},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
        )
    except FileNotFoundError:
        raise UserError("git: not installed, and a source is to be read from a checkout or tarball") from None


def _last(said: str) -> str:
    return ([line.strip() for line in said.splitlines() if line.strip()] or ["no message"])[-1]
