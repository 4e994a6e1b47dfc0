"""What ends with the sandbox is named, and what is asked about its runs afterwards says that it is down."""

from pathlib import Path

import pytest

from dsv4kit.cli import runs
from dsv4kit.cli.sandbox import _ending
from dsv4kit.errors import UserError
from dsv4kit.launch.run_dir import name_of_job
from dsv4kit.launch.slurm import Slurm
from dsv4kit.run.directory import RunDir
from dsv4kit.run.files import write_text
from dsv4kit.sandbox.spec import ROOT_VARIABLE


class Queue(Slurm):
    def run(self, *command: str) -> str:
        assert command[0] == "squeue"
        return "".join(
            f"dsv4kit|{job}\n" for job in ("RUNNING|a-0123abcd", *["PENDING|a-0123abcd"] * 2, "RUNNING|wrap")
        )


class Up:
    """A sandbox that is up."""

    alive = True
    client_env: dict[str, str] = {}  # noqa: RUF012


def test_jobs_are_counted_by_name_and_state() -> None:
    assert Queue().unfinished() == {"a-0123abcd": ["2 pending", "1 running"], "wrap": ["1 running"]}


def test_a_job_is_shown_as_its_run(tmp_path: Path) -> None:
    assert name_of_job(RunDir(tmp_path / "first-1").job_name) == "run first-1"
    assert name_of_job("wrap") == "job wrap"


def test_every_run_that_goes_down_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4kit.launch.slurm.Slurm", Queue)
    assert _ending(Up()) == ["ends run a: 2 pending, 1 running", "ends job wrap: 1 running"]  # type: ignore[arg-type]
    assert _ending(None) == []


def test_a_run_on_a_sandbox_that_is_down_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path))
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "sandbox"))
    write_text(tmp_path / "a" / "run.yaml", "run: a\nsite: {name: sandbox}\nsettings: {}\n")
    _, slurm = runs.open_run("a")
    with pytest.raises(UserError, match=r"^the sandbox is down; `dsv4kit sandbox up` starts it$"):
        slurm.states(["1"])
