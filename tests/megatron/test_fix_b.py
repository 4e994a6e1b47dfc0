"""Fix B: norm and clipping of gradients of several dtypes, with a fused kernel as it behaves on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.mimo import optimizer as mimo_optimizer
from megatron.core.optimizer import clip_grads, layer_wise_optimizer
from megatron.core.optimizer import optimizer as base_optimizer
from toy import Trainer

from dsv4kit.plugin.megatron_optimizer import clipping_per_dtype, grad_norm_per_dtype, no_grad_main_params
from dsv4kit.plugin.patching import State

pytestmark = pytest.mark.usefixtures("one_rank")

# 8 elements of bf16 and 8 of fp32, each 0.0625: the norm is sqrt(16 * 0.0625^2) = 0.25.
VALUE, SIZE, NORM = 0.0625, 8, 0.25


class OutOfBoundsError(Exception):
    """Where the GPU reports an illegal memory access."""


def _as_typed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of `tensor` read as that many elements of `dtype`: what a kernel does that is told a wrong type."""
    if dtype.itemsize > tensor.dtype.itemsize:
        raise OutOfBoundsError(f"{tensor.numel()} elements of {dtype} in {tensor.numel()} of {tensor.dtype}")
    return tensor.reshape(-1).view(dtype)[: tensor.numel()]


class FusedKernel:
    """Transformer Engine's multi-tensor launch: the whole list has the type of its first tensor."""

    def __init__(self) -> None:
        self.lists: list[list[torch.dtype]] = []

    def __call__(self, _kernel: Any, _overflow: Any, lists: list[list[torch.Tensor]], *rest: Any) -> Any:
        gradients = lists[0]
        self.lists.append([g.dtype for g in gradients])
        typed = [_as_typed(g, gradients[0].dtype) for g in gradients]
        if rest and isinstance(rest[0], bool):
            total = sum((t.float().nan_to_num().square().sum() for t in typed), torch.zeros(()))
            return total.sqrt().reshape(1), None
        for tensor in typed:
            tensor.mul_(rest[0])
        return None


@pytest.fixture
def kernel(gpu: None, monkeypatch: pytest.MonkeyPatch) -> FusedKernel:
    fake = FusedKernel()
    monkeypatch.setattr(clip_grads, "multi_tensor_applier", fake)
    return fake


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    original = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return calls


def _gradients(first: torch.dtype, second: torch.dtype) -> list[torch.Tensor]:
    return [torch.full((SIZE,), VALUE, dtype=first), torch.full((SIZE,), VALUE, dtype=second)]


def _params(gradients: list[torch.Tensor]) -> list[Any]:
    return [SimpleNamespace(decoupled_grad=g) for g in gradients]


BF16_FIRST = (torch.bfloat16, torch.float32)
FP32_FIRST = (torch.float32, torch.bfloat16)


def test_upstream_is_wrong_or_reads_out_of_bounds(kernel: FusedKernel) -> None:
    # The fp32 tensor read as 8 bf16 elements: four times 0.0625 and four times the empty low half.
    assert clip_grads.get_grad_norm_fp32(_gradients(*BF16_FIRST)) == pytest.approx(0.2165063, abs=1e-7)
    with pytest.raises(OutOfBoundsError):
        clip_grads.get_grad_norm_fp32(_gradients(*FP32_FIRST))
    with pytest.raises(OutOfBoundsError):
        clip_grads.clip_grad_by_total_norm_fp32(_params(_gradients(*FP32_FIRST)), 0.1, NORM, use_decoupled_grad=True)


@pytest.mark.parametrize("dtypes", [BF16_FIRST, FP32_FIRST])
def test_the_norm_is_right_with_one_reduction(
    dtypes: tuple[torch.dtype, torch.dtype], kernel: FusedKernel, reductions: list[Any]
) -> None:
    assert grad_norm_per_dtype(clip_grads).state is State.APPLIED
    assert clip_grads.get_grad_norm_fp32(_gradients(*dtypes)) == pytest.approx(NORM, abs=1e-7)
    assert len(reductions) == 1
    assert kernel.lists == [[torch.float32]]


def test_as_many_reductions_as_a_rank_with_one_dtype_or_none(kernel: FusedKernel, reductions: list[Any]) -> None:
    grad_norm_per_dtype(clip_grads)
    counts = []
    for gradients in (_gradients(*BF16_FIRST), _gradients(torch.float32, torch.float32), []):
        reductions.clear()
        clip_grads.get_grad_norm_fp32(gradients)
        counts.append(len(reductions))
    assert counts == [1, 1, 1]


@pytest.mark.parametrize("dtypes", [BF16_FIRST, FP32_FIRST])
def test_clipping_scales_every_gradient(dtypes: tuple[torch.dtype, torch.dtype], kernel: FusedKernel) -> None:
    assert clipping_per_dtype(clip_grads).state is State.APPLIED
    gradients = _gradients(*dtypes)
    clip_grads.clip_grad_by_total_norm_fp32(_params(gradients), NORM / 2, NORM, use_decoupled_grad=True)
    for gradient in gradients:
        torch.testing.assert_close(gradient.float(), torch.full((SIZE,), VALUE / 2), rtol=1e-2, atol=0)
    assert sorted(map(len, kernel.lists)) == [1, 1]


def test_the_result_is_precise_for_many_small_bf16_gradients(kernel: FusedKernel) -> None:
    grad_norm_per_dtype(clip_grads)
    gradients = [torch.full((999,), 1e-3, dtype=torch.bfloat16), torch.full((1001,), 1e-3)]
    exact = torch.cat([g.double() for g in gradients]).norm().item()
    assert clip_grads.get_grad_norm_fp32(gradients) == pytest.approx(exact, rel=1e-6)


def test_lists_of_one_dtype_are_passed_on_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    signatures = {
        "get_grad_norm_fp32": lambda grads_for_norm, norm_type=2, grad_stats_parallel_group=None: seen.append(
            (grads_for_norm, norm_type, grad_stats_parallel_group)
        ),
        "clip_grad_by_total_norm_fp32": lambda parameters, max_norm, total_norm, use_decoupled_grad=False: seen.append(
            (parameters, max_norm, total_norm, use_decoupled_grad)
        ),
    }
    for name, function in signatures.items():
        monkeypatch.setattr(clip_grads, name, function)
    grad_norm_per_dtype(clip_grads)
    clipping_per_dtype(clip_grads)
    seen.clear()  # of what the probes called
    group = object()
    single = _gradients(torch.bfloat16, torch.bfloat16)
    mixed = _gradients(*BF16_FIRST)
    params = _params(single)
    clip_grads.get_grad_norm_fp32(single, grad_stats_parallel_group=group)
    clip_grads.get_grad_norm_fp32(single[0])
    clip_grads.get_grad_norm_fp32(mixed, float("inf"))
    clip_grads.clip_grad_by_total_norm_fp32(params, 1.0, 2.0, True)
    assert seen[0][0] is single
    assert seen[0][1:] == (2, group)
    assert seen[1][0] is single[0]
    assert seen[2][0] is mixed
    assert seen[3][0] is params
    assert seen[3][1:] == (1.0, 2.0, True)


def test_bound_wherever_the_names_were_imported() -> None:
    grad_norm_per_dtype(clip_grads)
    clipping_per_dtype(clip_grads)
    norm, clip = clip_grads.get_grad_norm_fp32, clip_grads.clip_grad_by_total_norm_fp32
    assert base_optimizer.get_grad_norm_fp32 is norm
    assert layer_wise_optimizer.get_grad_norm_fp32 is norm
    assert base_optimizer.clip_grad_by_total_norm_fp32 is clip
    assert mimo_optimizer.clip_grad_by_total_norm_fp32 is clip
    assert "by an earlier call" in grad_norm_per_dtype(clip_grads).detail
    assert clip_grads.get_grad_norm_fp32 is norm


def test_inert_when_upstream_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fix as upstream may ship it: the kernel launched once per dtype, in a helper of the same module."""

    def norm(grads_for_norm: Any, norm_type: float = 2, grad_stats_parallel_group: Any = None) -> Any:
        for dtype in {g.dtype for g in grads_for_norm}:
            clip_grads.multi_tensor_applier(None, None, [[g for g in grads_for_norm if g.dtype is dtype]], False)

    def clip(parameters: Any, max_norm: Any, total_norm: Any, use_decoupled_grad: bool = False) -> Any:
        norm([p.decoupled_grad for p in parameters])

    monkeypatch.setattr(clip_grads, "get_grad_norm_fp32", norm)
    monkeypatch.setattr(clip_grads, "clip_grad_by_total_norm_fp32", clip)
    assert grad_norm_per_dtype(clip_grads).state is State.NOT_NEEDED
    assert clipping_per_dtype(clip_grads).state is State.NOT_NEEDED
    assert clip_grads.get_grad_norm_fp32 is norm
    assert clip_grads.clip_grad_by_total_norm_fp32 is clip


def test_the_probes_leave_the_module_as_it_was() -> None:
    before = dict(vars(clip_grads))
    clipping_per_dtype(clip_grads)
    changed = {name for name, value in vars(clip_grads).items() if before.get(name) is not value}
    assert changed == {"clip_grad_by_total_norm_fp32"}


def test_a_whole_step_of_the_precision_aware_optimizer(kernel: FusedKernel) -> None:
    from megatron.core.optimizer import distrib_optimizer

    no_grad_main_params(distrib_optimizer)
    trainer = Trainer(aware=True, offload=1.0)
    with pytest.raises(OutOfBoundsError):
        trainer.step()
    grad_norm_per_dtype(clip_grads)
    clipping_per_dtype(clip_grads)
    trainer.step()
