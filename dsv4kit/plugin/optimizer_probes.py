"""What the installed Megatron does with the state of an offloaded optimizer, seen on stand-ins of two parameters.

Each probe runs upstream's own function and looks at what has become of the tensors. Whether it raised says little: a
version that stopped raising KeyError has been seen to leave the loaded master behind instead (Megatron-LM #6124).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

Update = Callable[..., Any]


class CudaTyped(torch.nn.Parameter):  # type: ignore[misc, unused-ignore]
    """A parameter that calls itself a CUDA tensor, as the functions under test ask for the name of the type."""

    def type(self, *args: Any, **kwargs: Any) -> Any:
        name = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
        return super().type(*args, **kwargs) if args or kwargs else name[self.dtype]


class _Anything:
    """A configuration in which every switch that is not named is off."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def state_is_its_own(module: ModuleType) -> bool:
    """Whether `DistributedOptimizer` finds for each parameter of a two-dtype group the state of that parameter.

    Builds one on a bf16 parameter of 4 values and an fp32 one of 2, in this order, with ranges given by hand, without
    process group or device. Raises whatever upstream's code raises on the stand-ins.
    """
    sizes = {torch.bfloat16: 4, torch.float32: 2}
    params = [CudaTyped(torch.zeros(size, dtype=dtype)) for dtype, size in sizes.items()]
    buffers = [
        SimpleNamespace(
            param=param,
            param_dtype=param.dtype,
            grad_dtype=torch.float32,
            buckets=[SimpleNamespace(grad_data=torch.zeros(param.numel()), numel_unpadded=param.numel())],
        )
        for param in params
    ]
    upstream: Any = module.DistributedOptimizer

    def without_device(self: Any, optimizer: Any, config: Any, *_rest: Any, **_more: Any) -> None:
        self.optimizer, self.config = optimizer, config

    def ranges(_cls: Any, buffer: Any) -> Any:
        whole = SimpleNamespace(start=0, end=buffer.param.numel(), size=buffer.param.numel())
        return {(buffer.param_dtype, buffer.grad_dtype): [{"param_map": {buffer.param: {"param": whole}}}]}

    # Comes between the class and its base, and takes the base's place there.
    quiet = type("Quiet", (upstream.__mro__[1],), {"__init__": without_device})
    probe = type("Probe", (upstream, quiet), {"_build_gbuf_range_map": classmethod(ranges)})
    chunk = SimpleNamespace(ddp_config=_Anything(use_megatron_fsdp=False))
    config = _Anything(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False, config_logger_dir="")
    with mock.patch.object(module, "partition_buckets", return_value=[]):
        one: Any = probe(
            optimizer=torch.optim.AdamW([{"params": list(params)}]),
            config=config,
            grad_scaler=None,
            init_state_fn=None,
            model_chunks=[chunk],
            per_model_buffers={0: buffers},
            data_parallel_group=None,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
    found = [one._get_main_param_and_optimizer_states(param)["param"].numel() for param in params]
    return found == list(sizes.values())


def master_arrives(update: Update) -> tuple[bool, str]:
    """Whether `HybridDeviceOptimizer._update_fp32_params_by_new_state` puts every loaded master where it is stepped.

    Three parameters: a bf16 one with an fp32 copy, an fp32 one with a copy on the host, an fp32 one without any.
    """
    half, offloaded, own = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1), torch.zeros(1)
    copy, host = torch.zeros(1), torch.zeros(1)
    inner = {half: copy, offloaded: host, own: own}
    hdo = SimpleNamespace(
        param_update_in_fp32=True,
        state={param: {"master_param": torch.ones(1)} for param in inner},
        param_to_fp32_param={half: copy},
        fp32_param_to_orig_param={copy: half},
        gpu_params_map_cpu_copy={offloaded: host},
        cpu_copys_map_gpu_param={host: offloaded},
        param_to_inner_param=inner,
        inner_param_to_orig_param={stepped: param for param, stepped in inner.items()},
    )
    try:
        update(hdo)
    except Exception as error:
        return False, f"upstream's own ends in {type(error).__name__}"
    left = sum(not bool(stepped) for stepped in inner.values())
    return not left, f"upstream's own leaves {left} of {len(inner)} masters behind" if left else ""


def step_count_stays(set_states: Update) -> tuple[bool, str]:
    """Whether `DistributedOptimizer._set_main_param_and_optimizer_states` leaves Adam's step count alone.

    It comes from the parameter groups. What is loaded has none in one format, and in the other that of a step made to
    allocate the state.
    """
    for given in ({}, {"step": torch.tensor(1.0)}):
        param = torch.zeros(1)
        state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
        one = SimpleNamespace(
            model_param_group_index_map={param: (0, 0)},
            config=_Anything(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
            optimizer=SimpleNamespace(param_groups=[{"params": [param]}], state={param: state}),
        )
        loaded = {name: torch.ones(1) for name in ("param", "exp_avg", "exp_avg_sq")}
        try:
            set_states(one, param, {**loaded, **given})
        except Exception as error:
            return False, f"upstream's own ends in {type(error).__name__}"
        if state["step"].item() != 3.0:
            return False, "upstream's own takes the step count of the allocating step"
    return True, ""


def fp32_gradient_arrives(set_gradients: Update) -> tuple[bool, str]:
    """Whether `HybridDeviceOptimizer._set_sub_optimizer_grads` gives an fp32 parameter on the GPU its gradient."""
    param = torch.zeros(1)
    param.decoupled_grad = torch.ones(1, dtype=torch.bfloat16)
    hdo = _Anything(
        param_update_in_fp32=True,
        param_to_fp32_param={},
        gpu_params_map_cpu_copy={},
        cpu_copys_map_gpu_param={},
        cpu_optimizers=[],
        param_to_inner_param={param: param},
        inner_param_to_orig_param={param: param},
    )
    try:
        set_gradients(hdo)
    except Exception as error:
        return False, f"upstream's own ends in {type(error).__name__}"
    return param.grad is not None and bool(param.grad), ""
