"""Sources from a mirror, a checkout or a tarball: used where they are the commit, refused where they are not."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from dsv4kit.config.loading import hardware_of
from dsv4kit.errors import UserError
from dsv4kit.image import given
from dsv4kit.image.context import write_context, write_stack
from dsv4kit.image.stack import Fetched, GitSource, Stack, Submodule, stacks

BASE = f"nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:{'ab' * 32}"


def git(directory: Path, *words: str) -> str:
    name = [
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@t",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "protocol.file.allow=always",
    ]
    return subprocess.run(
        ["git", *name, "-C", directory, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


class Repository:
    """A repository with two commits, a program, a link, an ignored file that is tracked, and a submodule."""

    def __init__(self, root: Path) -> None:
        self.inner, self.path, self.root = root / "inner", root / "repository", root
        for path in (self.inner, self.path):
            path.mkdir()
            git(path, "init", "-q")
        (self.inner / "header.h").write_text("inner\n")
        git(self.inner, "add", ".")
        git(self.inner, "commit", "-qm", "inner")
        (self.path / "run.sh").write_text("#!/bin/sh\n")
        (self.path / "run.sh").chmod(0o755)
        (self.path / "link").symlink_to("run.sh")
        (self.path / ".gitignore").write_text("*.log\n")
        (self.path / "kept.log").write_text("tracked all the same\n")
        git(self.path, "add", "-f", ".")
        git(self.path, "submodule", "--quiet", "add", str(self.inner), "csrc/inner")
        git(self.path, "commit", "-qm", "one")
        self.first = git(self.path, "rev-parse", "HEAD")
        (self.path / "later").write_text("later\n")
        git(self.path, "add", "later")
        git(self.path, "commit", "-qm", "two")
        self.sha = git(self.path, "rev-parse", "HEAD")

    def tarball(self, sha: str | None = None) -> Path:
        """As a forge makes it: one directory, no git, nothing of submodules."""
        out = self.root / f"{(sha or self.sha)[:8]}.tar.gz"
        git(self.path, "archive", "--prefix=project-1/", "-o", str(out), sha or self.sha)
        return out

    @property
    def tree(self) -> str:
        """By git's own index, the submodule left out."""
        git(self.path, "rm", "-q", "--cached", "csrc/inner")
        found = git(self.path, "write-tree")
        git(self.path, "reset", "-q", "--hard")
        return found

    def fetched(self, tree: str | None = None) -> Fetched:
        return Fetched("mine", "https://host.invalid/mine", self.sha, tree, "MINE_SOURCE", "mine")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "context").mkdir()
    return tmp_path / "context" / "tree"


def check(into: Path) -> None:
    assert sorted(path.name for path in into.iterdir() if path.name not in ("csrc",)) == [
        ".gitignore", ".gitmodules", "kept.log", "later", "link", "run.sh",
    ]  # fmt: skip
    assert (into / "run.sh").stat().st_mode & 0o111
    assert (into / "link").is_symlink()


class TestACheckout:
    def test_is_taken_at_the_commit_whatever_it_shows_now(self, repository: Repository, into: Path) -> None:
        git(repository.path, "checkout", "-q", repository.first)
        (repository.path / "run.sh").write_text("changed here\n")
        given.put(repository.fetched(), repository.sha, str(repository.path), into)
        check(into)
        assert (into / "run.sh").read_text() == "#!/bin/sh\n"

    def test_without_the_commit_is_refused(self, repository: Repository, into: Path) -> None:
        with pytest.raises(UserError, match=r"^MINE_SOURCE='.*': 0{40} cannot be had from it: .*"):
            given.put(repository.fetched(), "0" * 40, str(repository.path), into)

    def test_has_to_have_what_the_stack_asks_for(self, repository: Repository, into: Path) -> None:
        given.put(repository.fetched(), repository.sha, str(repository.path), into, [repository.first[:9]])
        check(into)
        with pytest.raises(UserError, match=f"{repository.first} is without {repository.sha[:9]}, or the history"):
            given.put(repository.fetched(), repository.first, str(repository.path), into, [repository.sha[:9]])

    def test_has_to_be_one(self, repository: Repository, tmp_path: Path, into: Path) -> None:
        (tmp_path / "plain").mkdir()
        with pytest.raises(UserError, match="no git repository, so nothing says which commit it is"):
            given.put(repository.fetched(), repository.sha, str(tmp_path / "plain"), into)
        with pytest.raises(UserError, match="no such file or directory; a mirror's address, a checkout or a tarball"):
            given.put(repository.fetched(), repository.sha, str(tmp_path / "nothing"), into)


class TestATarball:
    def test_is_known_by_the_tree_of_its_files(self, repository: Repository, into: Path) -> None:
        given.put(repository.fetched(repository.tree), repository.sha, str(repository.tarball()), into)
        check(into)

    @pytest.mark.parametrize("change", ["content", "mode", "more", "less"])
    def test_with_anything_else_in_it_is_refused(
        self, repository: Repository, tmp_path: Path, into: Path, change: str
    ) -> None:
        wanted, root = repository.tree, tmp_path / "changed"
        root.mkdir()
        subprocess.run(["tar", "-x", "-f", repository.tarball(), "-C", root], check=True)
        program = root / "project-1" / "run.sh"
        if change == "content":
            program.write_text("#!/bin/sh\nrm -rf /\n")
        elif change == "mode":
            program.chmod(0o644)
        elif change == "more":
            (root / "project-1" / "more.log").write_text("ignored by git, read by setup.py\n")
        else:
            program.unlink()
        subprocess.run(["tar", "-c", "-f", tmp_path / "changed.tar", "-C", root, "project-1"], check=True)
        with pytest.raises(
            UserError, match=rf"its files are tree [0-9a-f]{{40}}, and those of mine at .* are {wanted}"
        ):
            given.put(repository.fetched(wanted), repository.sha, str(tmp_path / "changed.tar"), into)
        assert not into.exists()

    def test_of_another_commit_is_refused(self, repository: Repository, into: Path) -> None:
        tarball = repository.tarball(repository.first)
        with pytest.raises(UserError, match="its files are tree"):
            given.put(repository.fetched(repository.tree), repository.sha, str(tarball), into)

    def test_of_a_commit_whose_tree_nobody_wrote_down_is_refused_unless_it_has_its_git(
        self, repository: Repository, tmp_path: Path, into: Path
    ) -> None:
        with pytest.raises(UserError, match=r"the tree of mine at \w+ is not recorded .*pack one with its \.git"):
            given.put(repository.fetched(), repository.sha, str(repository.tarball()), into)
        whole = tmp_path / "whole.tar"
        subprocess.run(["tar", "-c", "-f", whole, "-C", tmp_path, "repository"], check=True)
        given.put(repository.fetched(), repository.sha, str(whole), into)
        check(into)

    def test_that_is_none_is_refused(self, repository: Repository, tmp_path: Path, into: Path) -> None:
        (tmp_path / "no.tar").write_text("no tarball")
        with pytest.raises(UserError, match=r"no.tar': not unpacked: "):
            given.put(repository.fetched(), repository.sha, str(tmp_path / "no.tar"), into)


def test_a_mirror_is_an_address_without_a_login() -> None:
    assert given.mirrors({"A_SOURCE": "https://host.invalid/a.git", "B_SOURCE": "/srv/b"}) == {
        "A_SOURCE": "https://host.invalid/a.git"
    }
    for place in (
        "git@host.invalid:a.git",
        "ssh://host.invalid/a",
        "https://me:secret@host.invalid/a",
        "https://h/$(x)",
    ):
        with pytest.raises(UserError, match=r"^A_SOURCE=.*an https address without a user's name") as error:
            given.mirrors({"A_SOURCE": place})
        assert "secret" not in str(error.value)


def stack_with(repository: Repository, **changes: object) -> Stack:
    """pro-grpo, whose only source is this repository with its submodule."""
    inner = Submodule(url="https://host.invalid/inner", sha=git(repository.inner, "rev-parse", "HEAD"), tree=None)
    source = GitSource(
        url="https://host.invalid/mine",
        sha=repository.sha,
        role="compile",
        reason="test",
        submodules={"csrc/inner": inner},
    )
    return stacks()["pro-grpo"].model_copy(update={"git": {"mine": source}, **changes})


def test_what_is_given_lies_in_the_context_and_changes_nothing_of_what_is_inside(
    repository: Repository, tmp_path: Path
) -> None:
    stack, machine = stack_with(repository), hardware_of("h100")
    places = {"MINE_SOURCE": str(repository.path), "MINE_INNER_SOURCE": str(repository.inner)}
    from_git = write_stack(stack, machine, tmp_path / "a", {"BASE_IMAGE": BASE})
    from_here = write_stack(stack, machine, tmp_path / "b", {"BASE_IMAGE": BASE, **places})
    mirror = write_stack(
        stack, machine, tmp_path / "c", {"BASE_IMAGE": BASE, "MINE_SOURCE": "https://mirror.invalid/x"}
    )
    assert from_git.stack_hash == from_here.stack_hash == mirror.stack_hash
    check(tmp_path / "b" / "sources" / "mine" / "tree")
    assert (tmp_path / "b" / "sources" / "mine-inner" / "tree" / "header.h").read_text() == "inner\n"
    assert not any(name.endswith("_SOURCE") for name in from_here.build_args)
    assert mirror.build_args["MINE_SOURCE"] == "https://mirror.invalid/x"
    assert not (tmp_path / "a" / "sources" / "mine" / "tree").exists()


def test_the_commands_of_the_dockerfile_take_what_is_given_and_else_the_commit_from_the_mirror(
    repository: Repository, tmp_path: Path
) -> None:
    stack, machine = stack_with(repository), hardware_of("h100")
    places = {"MINE_SOURCE": str(repository.path), "MINE_INNER_SOURCE": str(repository.inner)}
    write_stack(stack, machine, tmp_path / "here", {"BASE_IMAGE": BASE, **places})
    write_stack(stack, machine, tmp_path / "fetched", {"BASE_IMAGE": BASE})
    text = (tmp_path / "here" / "Dockerfile").read_text()
    body = next(
        part for part in re.split(r"\n(?=[A-Z#])", text) if part.startswith("RUN") and "mine-inner/tree" in part
    )
    environment = {"MINE_SOURCE": f"file://{repository.path}", "MINE_INNER_SOURCE": f"file://{repository.inner}"}
    for kind in ("here", "fetched"):
        root = tmp_path / f"root-{kind}"
        (root / "src").mkdir(parents=True)
        (root / "bin").mkdir()
        (root / "bin" / "pip").write_text('#!/bin/sh\nfor last; do :; done\ncp -r "$last" "$OUT/built"\n')
        (root / "bin" / "pip").chmod(0o755)
        subprocess.run(["cp", "-r", tmp_path / kind / "sources", root / "src" / "given"], check=True)
        script = body.removeprefix("RUN ").replace("/src/", f"{root}/src/").replace("/wheels/", f"{root}/wheels/")
        done = subprocess.run(
            ["sh", "-c", script],
            env={"PATH": f"{root}/bin:/usr/bin:/bin", "OUT": str(root), **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert (root / "built" / "csrc" / "inner" / "header.h").read_text() == "inner\n"
        assert (root / "built" / "later").is_file()
        assert (root / "src" / "shas" / "mine").read_text() == f"{repository.sha}\n"


def test_a_source_that_does_not_fit_writes_nothing(repository: Repository, tmp_path: Path) -> None:
    said = {"VERL_SHA": "a" * 40, "MEGATRON_CORE_SOURCE": str(repository.path)}
    with pytest.raises(UserError, match=r"^MEGATRON_CORE_SOURCE='.*': 43e45e13\w+ cannot be had from it"):
        write_context("h100", tmp_path / "context", said)
    assert not (tmp_path / "context").exists()


def test_every_commit_that_is_known_has_its_tree_too() -> None:
    without = [
        f"{stack.name}: {each.name}"
        for stack in stacks().values()
        for each in stack.repositories.values()
        if each.sha and not each.tree
    ]
    assert without == ["flash-sft: megatron-core"]  # on no branch: nobody could look it up


def test_the_context_says_which_commit_each_source_is(tmp_path: Path) -> None:
    write_context("h100", tmp_path, {"VERL_SHA": "a" * 40})
    assert (tmp_path / "sources" / "verl" / "sha").read_text() == f"{'a' * 40}\n"
    assert json.loads((tmp_path / "wheels" / "flash-mla" / "key.json").read_text())["gpu"] == 90
