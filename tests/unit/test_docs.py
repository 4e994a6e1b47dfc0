"""What README and docs name is there: links, targets of make with their variables, verbs with their options, files."""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4kit.cli import main, variables
from dsv4kit.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text()
# A command of make or of the kit, in a code block or between backticks, up to what ends it.
COMMAND = re.compile(r"(?:^ {4}|`)(?P<program>make|(?:\.venv/bin/)?dsv4kit) (?P<words>[^`\n#|;]+)", re.M)
# Variables that Makefile itself reads.
OF_MAKE = set(re.findall(r"\b([A-Z][A-Z0-9_]+)\b", MAKEFILE))


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    for match in COMMAND.finditer(text):
        yield match["program"].rpartition("/")[2], re.sub(r'"[^"]*"', "X", match["words"]).split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_target_of_make_and_every_variable_is_known(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.M))
    for program, (target, *words) in commands(page):
        if program != "make" or not re.fullmatch(r"[a-z][a-z0-9-]*", target):
            continue
        assert target in targets, f"make {target}"
        verbs = [verb for verb in variables.BY_VERB if variables.TARGETS.get(verb, verb) == target]
        known = {variable.name for verb in verbs for variable in variables.BY_VERB[verb]} | OF_MAKE
        for name in (word.partition("=")[0] for word in words if re.match(r"[A-Z][A-Z0-9_]*=", word)):
            assert name in known, f"make {target} {name}="


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_verb_and_every_option_is_known(page: Path) -> None:
    for program, words in commands(page):
        if program == "make" or words[0].startswith(("-", "...")) or words[-1].endswith(":"):  # a log line
            continue
        assert words[0] in VERBS, f"dsv4kit {words[0]}"
        known = options(verb_parser(words[0]))
        for word in words[1:]:
            if word.startswith("--"):
                assert word.partition("=")[0] in known, f"dsv4kit {' '.join(words)}"


@functools.cache
def verb_parser(verb: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    main._add_arguments(verb, made)
    return made


def options(of: argparse.ArgumentParser) -> set[str]:
    """Those of the verb and of the verbs below it."""
    found = {"--make"}
    for action in of._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*map(options, action.choices.values()))
    return found


def test_every_verb_and_every_target_of_a_verb_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    named = {words[0] for program, words in commands(ROOT / "README.md")}
    targets = {variables.TARGETS.get(verb, verb) for verb in variables.BY_VERB}
    assert {target for target in targets if target not in named} == set()
    assert {verb for verb in VERBS if not re.search(rf"\b{verb}\b", text)} == set()


def test_every_path_of_a_run_directory_is_in_its_listing() -> None:
    """docs/design.md shows what lies in a run; dsv4kit/run/directory.py spells it."""
    listing = (ROOT / "docs" / "design.md").read_text().partition("runs/<name>/\n")[2].partition("```")[0]
    tree = ast.parse((ROOT / "dsv4kit" / "run" / "directory.py").read_text())
    names = {
        node.right.value
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant)
    }
    names.remove("payload.pkl")  # below submitit/
    assert len(names) > 30
    shown = set(re.findall(r"[\w.-]+", listing))
    assert {name for name in names if name not in shown} == set()
