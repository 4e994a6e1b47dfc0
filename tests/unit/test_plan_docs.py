"""docs/memory.md prints the planner's own numbers."""

from __future__ import annotations

import pytest
from plan_cases import ALL_OFF_THE_GPU, BUILT_IN, GB300, H100, PRO_GB200, PRO_H100, flash_sft

from dsv4kit.config.loading import ROOT
from dsv4kit.plan.core import evaluate
from dsv4kit.plan.counted.checkpoint_size import checkpoint_size
from dsv4kit.plan.counted.inputs import Levers

PLAIN = ALL_OFF_THE_GPU._replace(bf16_gradients=False)
BALANCED = PRO_GB200._replace(layout=None)
FLASH = flash_sft(H100, 4, 4)

CASES = {
    "no lever": (BALANCED._replace(levers=PLAIN), PRO_H100._replace(levers=PLAIN)),
    "bf16 gradient buffers": (BALANCED, PRO_H100._replace(levers=ALL_OFF_THE_GPU)),
    "precision-aware optimizer": tuple(
        q._replace(levers=PLAIN._replace(precision_aware=True)) for q in (BALANCED, PRO_H100)
    ),
    "both": tuple(q._replace(levers=ALL_OFF_THE_GPU._replace(precision_aware=True)) for q in (BALANCED, PRO_H100)),
    "both, half of Adam on the GPU": tuple(
        q._replace(levers=ALL_OFF_THE_GPU._replace(precision_aware=True, offload_fraction=0.5))
        for q in (BALANCED, PRO_H100)
    ),
    "both, pinned memory not rounded up": tuple(
        q._replace(levers=ALL_OFF_THE_GPU._replace(precision_aware=True, pinned_round_threshold_mb=64))
        for q in (BALANCED, PRO_H100)
    ),
}


def lever_row(name):
    cells = []
    for question in CASES[name]:
        plan = evaluate(question, BUILT_IN)
        memory = plan.memory
        cells += [
            f"{memory.training_gib:.0f}",
            f"{memory.fullest_node.physical_gb:.0f}",
            plan.verdict.verdict,
        ]
    return f"| {name} | " + " | ".join(cells) + " |"


def checkpoint_row(contents, dist, question):
    size = checkpoint_size(question._replace(contents=contents, dist_checkpoint=dist)).size_gb
    return f"{size / 1000:.2f} TB" if size >= 1000 else f"{size:.0f} GB"


def _escaped(layout):
    """As Markdown tables want it."""
    return layout.replace("|", r"\|")


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_levers(page, name):
    assert lever_row(name) in page


@pytest.mark.parametrize(
    ("name", "contents", "dist"),
    [
        ("`[model, extra]`", ("model", "extra"), False),
        ("`[model, extra]` with `DIST_CKPT_PATH`", ("model", "extra"), True),
        ("`[model, optimizer, extra]`, precision-aware", ("model", "optimizer", "extra"), False),
    ],
)
def test_checkpoints(page, name, contents, dist):
    flash = FLASH._replace(levers=Levers())
    sizes = " | ".join(checkpoint_row(contents, dist, q) for q in (PRO_H100, flash))
    assert f"| {name} | {sizes} |" in page


def test_even_and_balanced_layout(page):
    even, balanced = (evaluate(q, BUILT_IN) for q in (PRO_GB200, BALANCED))
    assert f"`{_escaped(even.layout)}` | {even.memory.nodes[0].physical_gb:.0f} |" in page
    assert f"`{_escaped(balanced.layout)}` | {balanced.memory.nodes[0].physical_gb:.0f} |" in page


@pytest.mark.parametrize(("name", "pipeline", "expert"), [("PP32 x EP8, as published", 32, 8), ("PP16 x EP16", 16, 16)])
def test_the_alternative_on_h100(page, name, pipeline, expert):
    split = PRO_H100.parallel._replace(pipeline=pipeline, expert=expert)
    plan = evaluate(PRO_H100._replace(parallel=split), BUILT_IN)
    memory = plan.memory
    cells = (memory.training_gib, memory.fullest_node.physical_gb, plan.step.steady_s)
    assert f"| {name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |" in page


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("32 H100, PP4", flash_sft(H100, 4, 4)),
        ("128 H100, PP16", flash_sft(H100, 16, 16)),
        ("128 H100, PP4", flash_sft(H100, 16, 4)),
        ("32 GB300, PP4", flash_sft(GB300, 8, 4)),
    ],
)
def test_flash_sft(page, name, question):
    plan = evaluate(question, BUILT_IN)
    stage = plan.memory.fullest_stage
    assert f"| {name} | {stage.need_gib:.0f} of {stage.limit_gib:.0f} | {plan.verdict.verdict} |" in page
