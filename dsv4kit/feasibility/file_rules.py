"""The files a user names, as this machine sees them: they have to be readable, and data has to be of the right kind."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from dsv4kit import hints
from dsv4kit.errors import nearest
from dsv4kit.feasibility.case import Case, Refusal
from dsv4kit.weights import model_check

# What verl calls where no name is given (trainer/config/reward/reward.yaml).
_REWARD = "compute_score"


def readable(case: Case) -> Iterator[Refusal]:
    """A path the nodes will read must be absolute, and there as seen from here."""
    settings = case.settings
    given: list[tuple[str, str | None]] = [("model.path", settings.model.path)]
    given += [("data.train_files", path) for path in settings.data.train_files or []]
    given += [("data.val_files", path) for path in settings.data.val_files or []]
    given.append(("checkpoint.dist_checkpoint_path", settings.checkpoint.dist_checkpoint_path))
    if (reward := settings.reward.function_path) and "://" not in reward:
        given.append(("reward.function_path", reward))
    for key, path in given:
        if path is not None and (problem := _problem(key, path)):
            yield Refusal(key, path, "", f"{case.sources.get(key, key)}: {path!r}{problem}")


def _problem(key: str, path: str) -> str | None:
    if not path.startswith("/") or "\0" in path:
        return ": the nodes need an absolute path on the shared file system"
    if not os.access(path, os.R_OK):
        return " cannot be read" if os.path.exists(path) else " does not exist"
    if key == "model.path" and not os.path.isfile(os.path.join(path, "config.json")):
        return " is not a model in Hugging Face form, which has a config.json"
    return None


def whole_model(case: Case) -> Iterator[Refusal]:
    """What the nodes would find out an hour later: weights that are not all there, or a model of another shape."""
    path, geometry = case.settings.model.path, case.settings.model.geometry
    if path is None or not os.path.isfile(os.path.join(path, "config.json")):
        return
    directory, said = Path(path), case.sources.get("model.path", "model.path")
    if geometry is not None:
        for problem in model_check.shape_problems(model_check.config_of(directory), geometry.model_dump()):
            yield Refusal("model.path", path, said, f"{directory / 'config.json'}: {problem}")
    if (directory / model_check.INDEX).exists() and (absent := model_check.absent(directory)):
        why = f"{absent[0]} of {model_check.INDEX} is missing ({len(absent)} files are)"
        yield Refusal("model.path", path, said, why, f"`{hints.command('prepare model', MODEL_PATH=path)}` shows all")


def reward_function(case: Case) -> Iterator[Refusal]:
    """A reward function of one's own has to be Python, and there by its name: verl looks an hour later."""
    path, name = case.settings.reward.function_path, case.settings.reward.function_name or _REWARD
    if path is None or "://" in path or not os.path.isfile(path):
        return
    said = case.sources.get("reward.function_path", "reward.function_path")
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        yield Refusal("reward.function_path", path, said, f"{path}{line}: cannot be read as Python: {error}")
        return
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    others = any(isinstance(node, ast.Assign | ast.Import | ast.ImportFrom | ast.If | ast.Try) for node in tree.body)
    # A name may also come from an import or an assignment, which only Python itself can follow.
    mentioned = others and any(name in (getattr(node, "id", ""), getattr(node, "name", "")) for node in ast.walk(tree))
    if name not in defined and not mentioned:
        why = f"{path}: has no function {name!r}{nearest(name, defined)}"
        yield Refusal("reward.function_path", path, said, why, "SET=reward.function_name=NAME says which")


def data(case: Case) -> Iterator[Refusal]:
    """What `data_checks` finds in the data files."""
    if case.settings.data.train_files or case.settings.data.val_files:
        for problem in case.data.problems:
            yield Refusal("data", None, "", problem)
