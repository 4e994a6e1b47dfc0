"""DeepSeek-V4 itself through the chain: verl's SFT trainer and Megatron engine on two nodes, three segments.

    DSV4KIT_MEGATRON_LM=DIR DSV4KIT_MEGATRON_BRIDGE=DIR python -m pytest tests/e2e/test_dsv4.py

with checkouts as `dsv4kit sources` names them; skipped without (about ten minutes on two cores).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from user import Kit

from dsv4kit.run import metrics

HERE = Path(__file__).parent
STEPS = 6
PLACES = [os.environ.get(f"DSV4KIT_{name}") for name in ("MEGATRON_LM", "MEGATRON_BRIDGE")]

pytestmark = pytest.mark.skipif(
    not all(PLACES),
    reason="no DSV4KIT_MEGATRON_LM and DSV4KIT_MEGATRON_BRIDGE (`dsv4kit sources` says how to get them)",
)

WORDS = ("--model=dsv4-tiny", "--recipe=sft", f"--megatron-lm={PLACES[0]}", f"--megatron-bridge={PLACES[1]}")


@pytest.fixture(scope="module")
def chained(kit: Kit) -> str:
    """The profile as it is: three segments of two steps."""
    return kit.run("v4-chained", *WORDS)


@pytest.fixture(scope="module")
def whole(kit: Kit, chained: str) -> str:
    """The same steps in one segment."""
    return kit.run("v4-whole", *WORDS, f"--segment-steps={STEPS}")


def test_three_segments_each_go_on_where_the_one_before_ended(kit: Kit, chained: str) -> None:
    status = kit.status("v4-chained")
    assert status["state"] == "finished"
    assert [(s["start_step"], s["end_step"]) for s in status["segments"]] == [(0, 2), (2, 4), (4, 6)]


def test_the_chain_equals_the_uninterrupted_run_to_the_last_bit(kit: Kit, chained: str, whole: str) -> None:
    python = yaml.safe_load((kit.runs / "v4-whole" / "run.yaml").read_text())["python"]
    sides = [kit.runs / run / "checkpoints" / f"global_step_{STEPS}" for run in ("v4-chained", "v4-whole")]
    done = subprocess.run([python, HERE / "compare_megatron.py", *sides], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["weights"], found["differing"]) == (255, [])
    # Six buffers of experts have no padding; of the others a hundredth is.
    assert len(found["optimizer"]) == 12
    assert sorted(found["optimizer"].values())[:6] == [0.0] * 6
    assert max(found["optimizer"].values()) < 0.02


def test_every_metric_but_times_is_the_same(kit: Kit, chained: str, whole: str) -> None:
    merged = []
    for run in ("v4-chained", "v4-whole"):
        files = sorted((kit.runs / run).glob("segments/*/attempt-0/metrics.jsonl"))
        merged.append(metrics.merge(metrics.read_metrics(path) for path in files))
    assert [step.step for step in merged[0]] == list(range(1, STEPS + 1)) == [step.step for step in merged[1]]
    losses = [step.data["train/loss"] for step in merged[1]]
    assert losses[-1] < losses[0] - 0.5
    for one, other in zip(*merged, strict=True):
        # The count of tokens starts again with each start of the trainer.
        differing = [name for name in metrics.differing(one.data, other.data) if "total_tokens" not in name]
        assert differing == [], f"step {one.step}"
