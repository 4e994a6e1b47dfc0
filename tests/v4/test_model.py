"""A tiny DeepSeek-V4 builds and trains: one sequence and packed samples, MTP, and the loss of the indexer."""

from __future__ import annotations

import pytest
import tiny
import torch

pytestmark = pytest.mark.usefixtures("one_rank", "local", "cpu")


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
@pytest.mark.parametrize("mtp", [None, 1])
@pytest.mark.parametrize("is_packed", [False, True], ids=["one sequence", "packed"])
def test_every_parameter_gets_a_gradient_and_the_loss_falls(
    is_packed: bool, mtp: int | None, coefficient: float
) -> None:
    made = tiny.config(mtp_num_layers=mtp, dsa_indexer_loss_coeff=coefficient, dsa_indexer_use_sparse_loss=True)
    built = tiny.model(made)
    optimizer = torch.optim.AdamW(built.parameters(), lr=3e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = tiny.loss(built, tiny.packed() if is_packed else None)
        loss.backward()
        without = [n for n, p in built.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert [name for name in without if "indexer" not in name or coefficient] == []
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(6.3, abs=0.3)
    assert losses[0] > losses[1] > losses[2]


def test_both_dtypes_are_trained() -> None:
    kinds = {str(p.dtype) for p in tiny.model(tiny.config(dsa_indexer_loss_coeff=0.0)).parameters()}
    assert kinds == {"torch.bfloat16", "torch.float32"}


def test_without_the_coefficient_the_first_forward_fails() -> None:
    """Why the profiles set it: Megatron's own default is None."""
    with pytest.raises(TypeError, match="NoneType"):
        tiny.loss(tiny.model(tiny.config()))
