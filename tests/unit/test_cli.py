"""The command line: what it takes, from make or directly, and how it says no."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4kit import hints
from dsv4kit.cli import main, variables
from dsv4kit.cli.selection import overrides_of
from dsv4kit.errors import UserError

ROOT = Path(__file__).parents[2]
Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runs: Path) -> Refused:
    """Runs the console script with these words; it must refuse with one line, exit code 2, and leave nothing behind."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dsv4kit", *words])
        assert main.main() == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("dsv4kit: ")
        assert err.count("\n") == 1
        assert not runs.exists() or not any(runs.iterdir())
        return err

    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["submit"], "HW is not set; known: "),
        (["submit", "--hw=cqu"], "HW='cqu': no such name"),
        (["submit", "--hw=cpu", "--model=tinny"], "MODEL='tinny': no such name; known: "),
        (["submit", "--hw=cpu", "--recipe=ppo"], "RECIPE='ppo': no such name"),
        (["submit", "--hw=cpu", "--site=sandbx"], "(did you mean 'sandbox'?)"),
        (["submit", "--hw=cpu", "--nods=2"], "unrecognized arguments: --nods=2 (did you mean '--nodes'?)"),
        (["submit", "--hw=cpu", "--nodes=0"], "NODES=0"),
        (["submit", "--hw=cpu", "--steps=-3"], "STEPS=-3"),
        (["submit", "--hw=cpu", "--run=a/b"], "RUN='a/b': a run's name has letters"),
        (["submit", "--hw=cpu", "--run=a b"], "RUN='a b'"),
        (["submit", "--hw=cpu", "--run=$(id)"], "RUN='$(id)'"),
        (["submit", "--hw=cpu", "--run=../x"], "RUN='../x'"),
        (["submit", "--hw=cpu", "--run="], "RUN=''"),
        (["submit", "--hw=cpu", "--model-path=/none/such"], "MODEL_PATH=/none/such: '/none/such' does not exist"),
        (["submit", "--hw=cpu", "--model-path=here"], "absolute path"),
        (
            ["submit", "--hw=cpu", "--train-file=/none.parquet"],
            "TRAIN_FILE=/none.parquet: '/none.parquet' does not exist",
        ),
        (["submit", "--hw=cpu", "--verl=trainer.nodes=2"], "has no key 'trainer.nodes' (did you mean"),
        (["submit", "--hw=cpu", "--verl=trainer.nnodes=2"], "the kit sets this key itself, from NODES"),
        (["submit", "--hw=cpu", "--set=schedule.step=2"], "(did you mean 'steps'?)"),
        (["submit", "--hw=cpu", "--set=nonsense"], "is not of the form key=value"),
        (["submit", "--hw=cpu", "--time=soon"], "TIME=soon"),
        (["submit", "--hw=cpu", "--verl=trainer.project_name=\udcff"], r"project_name=\udcff': not UTF-8"),
        (["submit", "--hw=cpu", "--verl=ray_kwargs.ray_init.x={1: 2}"], "VERL ray_kwargs.ray_init.x: "),
        (["status"], "no run in"),
        (["logs", "nothing"], "no such run"),
        (["resume", "--run=$(id)"], "RUN='$(id)'"),
        (["cancel", "nothing"], "no such run"),
        (["statsu"], "(did you mean 'status'?)"),
        (["profiles", "show", "grpo-tiny-cqu"], "(did you mean 'grpo-tiny-cpu'?)"),
        (["profiles", "list", "x y"], "profiles list: takes no name; `dsv4kit profiles show 'x y'` shows one"),
        (
            ["submit", "--hw=cpu", "--set=checkpoint.directory=here"],
            "checkpoint.directory='here': not an absolute path",
        ),
        (["submit", "--hw=cpu", "--set=recipe.module=verl trainer"], "recipe.module='verl trainer': not the name of a"),
        (["submit", "--hw=cpu", "--set=recipe.module=verl..x"], "not the name of a Python module"),
        (["submit", "--hw=cpu", "--set=env.A-B=1"], "env.A-B='A-B': not the name of an environment variable: letters,"),
        (["submit", "--hw=cpu", "--set=plugins.a-b=True"], "plugins.a-b='a-b': not the name of a Python module"),
        (
            ["submit", "--hw=cpu", "--set=plugins.dsv4kit.plugin.segmentstop=True"],
            "SET plugins.dsv4kit.plugin.segmentstop=True: the kit has no module 'dsv4kit.plugin.segmentstop' (did you"
            " mean 'dsv4kit.plugin.segment_stop'?)",
        ),
        (["submit", "--hw=cpu", "--set=reward.function_path=r.py"], "neither the absolute path of a Python file nor"),
        (
            ["submit", "--hw=cpu", "--set=reward.function_path=/none/r.py"],
            "SET reward.function_path: '/none/r.py' does not exist",
        ),
        (
            ["submit", "--hw=cpu", "--set=reward.function_path=pkg://dsv4kit.plugin.toy_rewards"],
            "(did you mean 'dsv4kit.plugin.toy_reward'?)",
        ),
        (["submit", "--hw=cpu", "--set=reward.function_path=pkg://a/b"], "not the name of a Python module"),
    ],
)
def test_a_mistake_is_one_line(refused: Refused, words: list[str], expected: str) -> None:
    assert expected in refused(*words)


def test_the_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            main.run([*words, "--help"])
        assert exit_.value.code == 0
        return capsys.readouterr().out

    listed = " ".join(shown().split())
    assert all(f" {verb} {line}" in listed for verb, line in main.VERBS.items())
    for verb in main.VERBS:
        text = shown(verb)
        assert text.startswith(f"usage: dsv4kit {verb} ")
        assert all(variable.option in text for variable in variables.BY_VERB.get(verb, ()))


def test_a_run_that_exists_is_not_overwritten(
    refused: Refused, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "other-runs"
    (elsewhere / "first").mkdir(parents=True)
    monkeypatch.setenv("DSV4KIT_RUNS", str(elsewhere))
    assert "RUN='first': exists already" in refused("submit", "--hw=cpu", "--run=first")


def test_slurm_out_of_reach_is_one_line(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site.yaml"
    text = (ROOT / "slurm" / "sites" / "sandbox.yaml").read_text()
    site.write_text(
        text.replace("name: sandbox", "name: elsewhere").replace("python: null", "python: /usr/bin/python3")
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Slurm is not reachable: there is no sinfo" in refused("submit", "--hw=cpu", f"--site={site}")


def test_a_full_disk_is_one_line(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/runs/x")

    monkeypatch.setattr("dsv4kit.cli.submit.request", full)
    assert "/runs/x: No space left on device" in refused("submit", "--hw=cpu")


def test_variables_of_make_become_options() -> None:
    environ = {
        variables.NAMES: "HW RUN SET DRY_RUN",
        "DSV4KIT_MAKE_HW": "cpu",
        "DSV4KIT_MAKE_RUN": "$(id)",
        "DSV4KIT_MAKE_SET": "a.b=1 'c=2 3'",
        "DSV4KIT_MAKE_DRY_RUN": "1",
    }
    options = variables.options_from_make("submit", environ)
    assert options == ["--hw=cpu", "--run=$(id)", "--set=a.b=1", "--set=c=2 3", "--dry-run"]


def test_a_misspelt_variable_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown variable hw \(did you mean 'HW'\?\); allowed: HW, "):
        variables.options_from_make("submit", {variables.NAMES: "hw"})
    with pytest.raises(UserError, match=r"unknown variable NODE \(did you mean 'NODES'\?\); "):
        variables.options_from_make("submit", {variables.NAMES: "NODE"})


def test_a_flag_takes_yes_and_no_only() -> None:
    assert variables.options_from_make("submit", {variables.NAMES: "FOLLOW", "DSV4KIT_MAKE_FOLLOW": "0"}) == [
        "--no-follow"
    ]
    with pytest.raises(UserError, match="DRY_RUN='perhaps'"):
        variables.options_from_make("submit", {variables.NAMES: "DRY_RUN", "DSV4KIT_MAKE_DRY_RUN": "perhaps"})


def test_every_setting_in_the_table_exists() -> None:
    from dsv4kit.config.loading import load_settings
    from dsv4kit.config.tree import leaves

    known = {key for key, _ in leaves(load_settings("cpu", "tiny", "grpo").settings.model_dump())}
    own = {variable.setting for variable in variables.SETTINGS if not str(variable.setting).startswith("env.")}
    assert own <= known


def test_values_arrive_as_they_were_typed() -> None:
    hostile = 'it\'s $HOME `id` "x" |*\n é'
    args = main.build_parser().parse_args(
        ["submit", f"--verl=trainer.project_name={hostile}", f"--set=description={hostile}"]
    )
    assert [override.value for override in overrides_of(args)] == [hostile, hostile]


def make(*words: str) -> "subprocess.CompletedProcess[str]":
    """make with the real Makefile, and a stand-in for the kit that prints what it was handed."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "DSV4KIT_MAKE"))}
    return subprocess.run(["make", "-C", str(ROOT), "-s", *words], capture_output=True, text=True, env=clean)


@pytest.fixture
def handed_over(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The variables the Makefile hands to the kit for these words."""
    kit = tmp_path / "kit"
    kit.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "handed = {k: v for k, v in os.environ.items() if k.startswith('DSV4KIT_MAKE')}\n"
        "print(json.dumps(handed | {'argv': sys.argv[1:]}))\n"
    )
    kit.chmod(0o755)

    def run(*words: str) -> dict[str, str]:
        done = make("submit", "-o", "setup", f"KIT={kit}", *words)
        assert done.returncode == 0, done.stderr
        found: dict[str, str] = json.loads(done.stdout)
        return found

    return run


@pytest.mark.parametrize("value", ["$(shell touch {0})", "`touch {0}`", "$$x", "a b 'c'", 'é|*"', "$(id)", "#x", "%"])
def test_make_hands_values_over_untouched(
    handed_over: Callable[..., dict[str, str]], tmp_path: Path, value: str
) -> None:
    value = value.format(tmp_path / "pwned")
    assert handed_over(f"RUN={value}")["DSV4KIT_MAKE_RUN"] == value
    assert not (tmp_path / "pwned").exists()


def test_make_names_every_variable_it_was_given(handed_over: Callable[..., dict[str, str]]) -> None:
    found = handed_over("HW=cpu", "NODE=2")
    assert {"HW", "NODE"} <= set(found[variables.NAMES].split())
    assert found["argv"] == ["--make", "submit"]  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["test-unit", "FOO=1"], "make test-unit: unknown variable FOO; allowed: PYTHON."),
        (["help", "FOO=$(shell touch {0})"], "make help: unknown variable FOO"),
        (["FOO=1"], "make help: unknown variable FOO"),
        (["runtime", "TORCH=1"], "unknown variable TORCH; allowed: PYTHON TORCH_INDEX."),
        (["lint", "TORCH_INDEX=1"], "make lint: unknown variable TORCH_INDEX; allowed: PYTHON."),
        (["sumbit", "HW=cpu"], "No rule to make target 'sumbit'"),
    ],
)
def test_make_without_the_kit_takes_no_unknown_variables_either(
    words: list[str], expected: str, tmp_path: Path
) -> None:
    done = make(*(word.format(tmp_path / "pwned") for word in words))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert expected in done.stderr
    assert not (tmp_path / "pwned").exists()


def test_makes_list_of_the_kits_targets_is_that_of_the_verbs() -> None:
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("KIT_TARGETS")]
    assert set(line.split()[2:]) == set(hints.TARGETS.values())


def test_make_help_lists_every_target() -> None:
    listed = make("help").stdout
    for target in ("setup", "submit", "status", "logs", "resume", "cancel", "test", "test-e2e", "lint", "bench"):
        assert f"make {target} " in listed


@pytest.mark.parametrize("long", [False, True])
def test_nothing_of_other_pythons_reaches_the_command_line_tool(tmp_path: Path, long: bool) -> None:
    """With another tool's PYTHONPATH or a PYTHONHOME in the shell, it ran their packages or did not start."""
    script, isolate = tmp_path / "dsv4kit", Path(__file__).parents[2] / "containers" / "isolate.sh"
    head = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n" if long else f"#!{sys.executable}\n"
    script.write_text(head + "import sys\nfrom dsv4kit.cli.main import main\nsys.exit(main())\n")
    script.chmod(0o755)
    (tmp_path / "argparse.py").write_text("raise SystemExit(7)")
    hostile = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run([script, "--version"], env=hostile, capture_output=True).returncode == 7
    for _ in range(2):  # a second time changes nothing
        subprocess.run([isolate, script], check=True)
        for more in ({}, {"PYTHONHOME": "/nowhere"}):
            done = subprocess.run([script, "--version"], env={**hostile, **more}, capture_output=True, text=True)
            assert (done.returncode, done.stdout[:7]) == (0, "dsv4kit"), done.stderr


@pytest.mark.parametrize(("before", "after"), [(0o000, 0o002), (0o022, 0o022), (0o077, 0o077)])
def test_nothing_it_writes_can_be_written_by_everybody(before: int, after: int) -> None:
    code = (
        f"import os, sys; os.umask({before}); sys.argv = ['dsv4kit', '--version']\n"
        "from dsv4kit.cli import main\n"
        "try:\n    main.main()\nexcept SystemExit:\n    print(os.umask(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) == after


def test_without_a_verb_all_of_them_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dsv4kit"])
    assert main.main() == 2
    assert "start a run" in capsys.readouterr().out
