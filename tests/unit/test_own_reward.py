"""A reward function of the user's: looked at before the run, and the run's own from then on."""

from __future__ import annotations

from pathlib import Path

import pytest
from file_queue import Cluster

from dsv4kit.config.loading import Override
from dsv4kit.errors import UserError
from dsv4kit.feasibility import file_rules
from dsv4kit.run.node_spec import NodeSpec

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
KEY = "reward.custom_reward_function.path="


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def own(file: Path, name: str | None = None) -> list[Override]:
    return [
        Override("reward.function_path", str(file), "SET reward.function_path"),
        Override("reward.function_name", name, "SET reward.function_name"),
    ]


def told(cluster: Cluster) -> list[str]:
    return [word.partition("=")[2].strip("'") for word in NodeSpec.load(cluster.run).overrides if word.startswith(KEY)]


def test_the_run_has_its_own_copy_and_its_trainer_is_told_of_that(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "mine" / "my reward.py"
    file.parent.mkdir()
    file.write_text(REWARD)
    submission = cluster.submission(*own(file))
    submission.check()
    submission.submit(lambda line: None)
    file.write_text("nothing of it is left")
    copy = cluster.run.own / "my reward.py"
    assert copy.read_text() == REWARD
    assert told(cluster) == [str(copy)]


def test_a_module_of_the_kits_is_frozen_with_the_kit(cluster: Cluster) -> None:
    cluster.submit()
    assert told(cluster) == ["pkg://dsv4kit.plugin.toy_reward"]
    assert not cluster.run.own.exists()


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (REWARD.replace(":\n", "\n", 1), None, " line 1: cannot be read as Python: "),
        ("def compute_scores():\n    pass\n", None, "has no function 'compute_score' (did you mean 'compute_scores'?)"),
        (REWARD, "score", "has no function 'score'"),
    ],
)
def test_what_verl_would_find_out_an_hour_later(
    cluster: Cluster, tmp_path: Path, content: str, name: str | None, said: str
) -> None:
    (tmp_path / "r.py").write_text(content)
    with pytest.raises(UserError) as refused:
        cluster.submission(*own(tmp_path / "r.py", name)).check()
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"SET reward.function_path: {tmp_path / 'r.py'}")


@pytest.mark.parametrize(
    "content", [REWARD, "from m import compute_score\n", "import m\ncompute_score = m.score\n", "async " + REWARD]
)
def test_a_function_may_come_from_anywhere(cluster: Cluster, tmp_path: Path, content: str) -> None:
    (tmp_path / "r.py").write_text(content)
    case = cluster.submission(*own(tmp_path / "r.py")).case
    assert list(file_rules.reward_function(case)) == []
