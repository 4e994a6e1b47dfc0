"""What every profile tells verl and its nodes: composed with verl's real tree, and compared with reviewed text."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4kit.config.loading import combinations, load_settings, load_site
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.submission import Submission
from dsv4kit.run.directory import RunDir
from dsv4kit.verl_keys import chat_template

FAR = load_site("sandbox").model_copy(update={"name": "far", "python": "/env/bin/python"})


def submission(name: str) -> Submission:
    """A run of the profile on a cluster that is not at hand."""
    combination = combinations()[name]
    resolved = load_settings(combination["hardware"], combination["model"], combination["recipe"])
    run = RunDir(Path("/shared/runs/golden"))
    return Submission(resolved, FAR, run, Slurm({}), "/env/bin/python", "/shared/weights", "/shared/data")


@pytest.mark.parametrize("name", sorted(combinations()))
def test_overrides_and_environment(golden: Callable[[str, str], None], name: str) -> None:
    run = submission(name)
    run.check()
    lines = list(run.overrides)
    if template := chat_template.read(run.resolved.settings.model.chat_template_file):
        at = next(index for index, line in enumerate(lines) if ".custom_chat_template=" in line)
        assert len(lines[at]) > len(template)
        lines[at] = lines[at].partition("=")[0] + f"=<text of {run.resolved.settings.model.chat_template_file}>"
    env = [f"{key}={value}" for key, value in sorted(run.node_spec().env.items())]
    golden(f"overrides/{name}.txt", "\n".join([*lines, "", "# environment of every process", *env, ""]))
    shown = run.dry_run()
    assert "#SBATCH --nodes=" in shown
    assert shown.count("/segments/0001/segment.sbatch\n#!/bin/bash\n") == 1
