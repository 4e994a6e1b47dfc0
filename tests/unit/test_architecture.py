"""The house keeps its shape: who may import whom, what the nodes may import, and what may start quickly."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4kit.launch.freeze import FIRST, freeze

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dsv4kit"

# Package -> what it may import of the kit. `run`, `checkpoint`, `node` and `plugin` are frozen into each run and work
# where the control plane is not installed.
ALLOWED = {
    "run": {"run"},
    "checkpoint": {"checkpoint", "run"},
    "plugin": {"plugin", "run"},
    "node": {"checkpoint", "node", "run"},
    "config": {"config", "errors", "yaml_text"},
    "plan": {"checkpoint", "config", "errors", "plan", "text_table", "yaml_text", "run"},
    "verl_keys": {"config", "errors", "quoting", "verl_keys", "run"},
    "weights": {"checkpoint", "errors", "weights"},
    "prepare": {"errors", "prepare"},
    "feasibility": {"config", "errors", "feasibility", "hints", "plan", "plugin", "verl_keys", "weights"},
    "image": {
        *("config", "errors", "feasibility", "hints", "image", "libraries", "locking", "packages", "plugin", "run"),
        *("templates", "verl_keys"),
    },
    "report": {"checkpoint", "config", "errors", "launch", "report", "run", "text_table"},
    "sandbox": {
        *("config", "errors", "hints", "launch", "locking", "packages", "run", "sandbox", "templates", "text_table"),
    },
    "launch": {
        *("checkpoint", "config", "errors", "feasibility", "hints", "image", "launch", "node", "plan", "quoting"),
        *("libraries", "run", "templates", "verl_keys", "yaml_text"),
    },
}


def kit_imports(path: Path) -> set[str]:
    """Dotted names below `dsv4kit.` that the module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("dsv4kit.") for name in found if name.startswith("dsv4kit.")}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_run_one_way(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        reached = {name.partition(".")[0] for name in kit_imports(path)} - {"__version__"}
        assert reached <= ALLOWED[package], path


# What has to say whether a run can work, and so asks for refusals.
ASKING = ("cli.plan", "launch.submission", "launch.resume", "launch.doctor")
# Of the rules' own modules, what others may use: sizes the rules are made of, and the rules on an image alone.
SHARED = {
    *("feasibility.trainer_rules.node_unit", "feasibility.verl_rules", "feasibility.verl_rules.NOT_SET"),
    "feasibility.image_rules",
}


@pytest.mark.parametrize("module", ASKING)
def test_the_refusals_are_asked_by_everyone(module: str) -> None:
    assert "feasibility.refusals" in modules()[module]


def test_nobody_asks_a_rule_past_the_list() -> None:
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        reached = kit_imports(path)
        if room != "feasibility":
            assert {n for n in reached if n.startswith("feasibility.") and "_rules" in n} <= SHARED, path
        if room not in ("feasibility", "plan"):
            assert not {n for n in reached if n.startswith("plan.counted.checks")}, path


# Rooms of one package: each may import those before it.
ROOMS = {"plan": ("counted", "fitted", "shown")}


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_rooms_of_a_package_import_one_way(package: str) -> None:
    rooms = ROOMS[package]
    for number, room in enumerate(rooms):
        later = {f"{package}.{name}" for name in rooms[number + 1 :]}
        for path in (PACKAGE / package / room).rglob("*.py"):
            reached = {".".join(name.split(".")[:2]) for name in kit_imports(path)}
            assert not reached & later, path


@functools.cache
def modules() -> dict[str, set[str]]:
    """Every module of the kit and the modules of the kit it imports, wherever in it."""
    paths = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    found = {}
    for name, path in paths.items():
        reached = kit_imports(path)
        # `from package import module` names the module; `from module import name` has it one step up.
        found[name] = {n if n in paths else n.rpartition(".")[0] for n in reached} & paths.keys() - {name}
    return found


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_no_modules_of_a_package_import_each_other_in_a_circle(package: str) -> None:
    inside = {name: {n for n in to if n.startswith(f"{package}.")} for name, to in modules().items()}
    inside = {name: to for name, to in inside.items() if name.startswith(f"{package}.")}
    while free := [name for name, to in inside.items() if not to & inside.keys()]:
        for name in free:
            del inside[name]
    assert sorted(inside) == []


def test_no_class_name_occurs_twice() -> None:
    where: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


# Public names that nothing in the kit uses, and why they are there.
USED_FROM_OUTSIDE = {
    "GPU_FAULT": "run/signatures.json has its value",
    "STORAGE_FULL": "run/signatures.json has its value",
    "CpuPlatform": "vLLM asks for the platform plugin by its path",
    "SeededSingleTurn": "verl reads it from deterministic.yaml",
    "NEVER_STARTED": "the batch script writes it",
    "differing": "what deterministic mode promises, for the tests that hold it to it",
    "Recorded": "what was written down of an image, for the tests that have no image",
    "needed_modules": "names what is to be written down of an image",
}


def defined(tree: ast.Module) -> set[str]:
    """Public functions, classes and constants of a module."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(target, ast.Name):
                names.add(target.id)
    return {name for name in names if not name.startswith("_")}


def used(tree: ast.Module) -> set[str]:
    """Names a module reads, and words of its strings that can be paths or names of code; imports do not count."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            names.update(re.findall(r"\w+", node.value))
    return names


def test_every_public_name_is_used_in_the_kit() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    everywhere: set[str] = set().union(*map(used, trees.values()))
    unused = {name for tree in trees.values() for name in defined(tree)} - everywhere
    assert unused - USED_FROM_OUTSIDE.keys() == set()
    assert USED_FROM_OUTSIDE.keys() - unused == set(), "used now: no exception is needed"


def test_a_name_that_is_only_imported_or_only_set_counts_as_unused() -> None:
    tree = ast.parse("from x import other\nSET = 1\ndef f() -> None: ...\nf()\n")
    assert defined(tree) - used(tree) == {"SET"}
    assert "other" not in used(tree)


def test_the_frozen_kit_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    freeze(tmp_path / "kit")
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("checkpoint", "node", "run")
        for path in (PACKAGE / package).rglob("*.py")
        if path.name not in ("__init__.py", FIRST)
    ]
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'kit')!r}]\n"
        f"import submitit.core._submit, submitit.slurm.slurm\n"
        f"import importlib\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "found = [(name, getattr(module, '__file__', '') or '') for name, module in sys.modules.items()]\n"
        "outside = {name.split('.')[0] for name, origin in found if 'site-packages' in origin}\n"
        "print(sorted(outside))\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_frozen_kit_has_no_compiled_leftovers_and_no_control_plane(tmp_path: Path) -> None:
    freeze(tmp_path / "kit")
    names = {str(path.relative_to(tmp_path / "kit")) for path in (tmp_path / "kit").rglob("*") if path.is_file()}
    assert not any(name.endswith(".pyc") for name in names)
    assert "dsv4kit/node/agent.py" in names
    assert "dsv4kit/plugin/deterministic.yaml" in names
    assert not any(name.startswith(("dsv4kit/cli", "dsv4kit/launch", "dsv4kit/config")) for name in names)


def last_line_of(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.splitlines()[-1]


def test_help_imports_nothing_slow() -> None:
    script = (
        "import sys; from dsv4kit.cli.main import VERBS, build_parser; parser = build_parser()\n"
        "for words in [['--help'], *([verb, '--help'] for verb in VERBS)]:\n"
        "    try: parser.parse_args(words)\n"
        "    except SystemExit: pass\n"
        "print([m for m in ('pydantic', 'submitit', 'hydra', 'jinja2', 'yaml', 'torch') if m in sys.modules])"
    )
    assert last_line_of(script) == "[]"


def test_only_the_verb_that_is_asked_for_is_imported() -> None:
    script = (
        "import sys; from dsv4kit.cli.main import VERBS, build_parser; build_parser().parse_args(['status'])\n"
        "print([verb for verb in VERBS if f'dsv4kit.cli.{verb}' in sys.modules])"
    )
    assert last_line_of(script) == "['status']"


def test_a_plan_imports_only_what_it_uses() -> None:
    script = (
        "import sys; from dsv4kit.cli.main import main\n"
        "sys.argv = ['dsv4kit', 'plan', '--hw', 'gb200', '--nodes', '64']\n"
        "main()\n"
        "print([m for m in ('jinja2', 'submitit', 'hydra', 'statistics') if m in sys.modules])"
    )
    assert last_line_of(script) == "[]"


def test_what_is_frozen_into_runs_is_frozen_whole(tmp_path: Path) -> None:
    freeze(tmp_path / "kit")
    for package in ("run", "checkpoint"):
        frozen = {path.name for path in (tmp_path / "kit" / "dsv4kit" / package).iterdir()}
        assert frozen == {path.name for path in (PACKAGE / package).glob("*.*")}


@pytest.mark.parametrize("package", ["run", "checkpoint"])
def test_the_formats_need_the_standard_library_only(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        names = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert names <= {*sys.stdlib_module_names, "dsv4kit"}, path


def texts(path: Path) -> Iterator[str]:
    """Every text in the code of a module; docstrings are none, and of an f-string its fixed parts are."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


# Of a run directory, where no other file has the name; a script's template is not one of its files.
NAME_IN_A_RUN = re.compile(
    r"\b(node|chain|plan|outcome|ready|over|stopped|torchrun|ray_head|ray_nodes|request|changes|cancelled|lease|doctor"
    r"|bandwidth)\.json\b|\brun\.yaml\b|\b(phases|metrics)\.jsonl\b|\b(driver|slurm)\.log\b|\bsegment\.sbatch(?!\.j2)"
    r"|\bjob\.env\b|\battempt-|\bsegments/"
)
# Words besides, names in a run only where they end a path: `run.path / "kit"`.
WORD_IN_A_RUN = {
    *("segments", "nodes", "verdict", "excluded_nodes", "STOP", "quarantine", "ray-logs", "checkpoints", "submitit"),
}


def ends_of_paths(path: Path) -> Iterator[str]:
    """Every text that a module puts behind a `/`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            yield str(node.right.value)


def test_names_in_a_run_directory_are_spelt_in_its_own_package_only() -> None:
    outside = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "run")]
    found = [(str(path), text) for path in outside for text in texts(path) if NAME_IN_A_RUN.search(text)]
    # The sandbox has a directory of its own, with `nodes` in it.
    found += [
        (str(path), text)
        for path in outside
        if not path.is_relative_to(PACKAGE / "sandbox")
        for text in ends_of_paths(path)
        if text in WORD_IN_A_RUN
    ]
    assert found == []


def test_what_verl_leaves_on_disk_is_spelt_in_its_own_package_only() -> None:
    name = re.compile(r"global_step_|latest_checkpointed_iteration|ckpt_contents\.json|_world_size_")
    found = {
        str(path.relative_to(PACKAGE)): text
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "checkpoint")
        for text in texts(path)
        if name.search(text)
    }
    # What verl prints, which is not a path to open.
    found.pop("run/driver_log.py", None)
    assert found == {}


def test_a_file_is_replaced_in_one_place_only() -> None:
    """`os.replace` and `Path.replace`: the one function beside them syncs the file and its directory."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                not isinstance(node, ast.Call)
                or not isinstance(node.func, ast.Attribute)
                or node.func.attr != "replace"
            ):
                continue
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            # A text's `replace` has two arguments or more, and that of dataclasses has keywords.
            if owner == "os" or (len(node.args) == 1 and not node.keywords and owner != "dataclasses"):
                found.append(str(path.relative_to(PACKAGE)))
    assert found == ["run/files.py"]


def imports_within(path: Path, package: str) -> set[str]:
    """Modules of the package that the module imports at once; what a function imports later makes no circle."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith(f"dsv4kit.{package}.")}


@pytest.mark.parametrize("package", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_no_package_has_a_circle_inside(package: str) -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (PACKAGE / package).rglob("*.py")
    }
    graph = {name: imports_within(path, package) & modules.keys() for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_two_test_files_that_run_together_have_one_name() -> None:
    """pytest takes the second for the first, and ends with an error that comes and goes with the order."""
    tests = Path(__file__).parents[1]
    together = ("unit", "golden", "cluster", "runtime", "e2e")
    names = [path.name for layer in together for path in (tests / layer).glob("test_*.py")]
    assert sorted(names) == sorted(set(names))
