"""What takes processes of its own: `python cases.py CASE RANK WORLD DIRECTORY` writes DIRECTORY/RANK.json.

Each runs with the checkouts first on its path (start.py) and the stand-ins of `dsv4kit.plugin.cpu_megatron`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsv4kit.plugin import cpu_megatron

LOCAL = {
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
    "cross_entropy_loss_fusion": False,
    "apply_rope_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "use_cpu_initialization": True,
}
"""Fields of Megatron's configuration that Bridge sets for a GPU, as a CPU needs them."""


def world(rank: int, size: int, folder: Path, **split: int) -> None:
    """Process groups over a file, and Megatron's groups on top."""
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(**split)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def expert_parallel(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Experts on two ranks, DDP over both: the losses of three steps on the same samples."""
    import tiny

    cpu_megatron.cpu_for_cuda(cpu_megatron.ForGood)
    cpu_megatron.local_layers(cpu_megatron.ForGood)
    world(rank, size, folder, expert_model_parallel_size=size)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    made = tiny.config(dsa_indexer_loss_coeff=0.0, expert_model_parallel_size=size)
    model = tiny.model(made)
    ddp = DistributedDataParallel(made, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(3):
        ddp.zero_grad_buffer()
        loss = tiny.loss(ddp)
        loss.backward()
        ddp.finish_grad_sync()
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        optimizer.step()
        losses.append(loss.item())
    local = sum(1 for name, _ in model.named_parameters() if "local_experts" in name and "linear_fc1" in name)
    return {"losses": losses, "experts": local}


def pipeline_parallel(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Two stages of two and three layers, one forward one backward; the losses are the last stage's."""
    import tiny

    cpu_megatron.cpu_for_cuda(cpu_megatron.ForGood)
    cpu_megatron.local_layers(cpu_megatron.ForGood)
    cpu_megatron.CudaIsCpu().__enter__()  # the schedule counts tokens on "cuda"
    world(rank, size, folder, pipeline_model_parallel_size=size)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    made = tiny.config(
        dsa_indexer_loss_coeff=0.0,
        pipeline_model_parallel_size=size,
        pipeline_model_parallel_layout="Ett|tttL",
        # As verl says it; Gloo has no batched sends.
        batch_p2p_comm=False,
        variable_seq_lengths=True,
    )
    model = tiny.model(made, pre_process=rank == 0, post_process=rank == size - 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def forward(_data: Any, stage: Any) -> tuple[torch.Tensor, Any]:
        out = tiny.forward(stage)
        return out, lambda tensor: (tensor.float().mean(), {"loss": tensor.float().mean().item()})

    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([]),
            model=[model],
            num_microbatches=2,
            seq_length=tiny.LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        losses += [sum(one["loss"] for one in found) / len(found)] if found else []
    return {"losses": losses, "layers": len(model.module.decoder.layers)}


def bridge(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """A Hugging Face model through Megatron-Bridge and back, and what both sides say to the same tokens."""
    import tiny

    cpu_megatron.install()
    from megatron.bridge import AutoBridge
    from safetensors.torch import load_file
    from transformers import DeepseekV4ForCausalLM

    weights = folder.parent / "model"
    world(rank, size, folder)
    made = AutoBridge.from_hf_pretrained(str(weights), trust_remote_code=True)
    provider = made.to_megatron_provider(load_weights=False)
    fields = {**LOCAL, "dsa_indexer_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"}
    fields |= {"use_fused_mhc": False, "apply_dsa_kernel_fusion": False, "params_dtype": torch.bfloat16, "bf16": True}
    for name, value in fields.items():
        setattr(provider, name, value)
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    made.load_hf_weights(model, str(weights))
    before, after = load_file(weights / "model.safetensors"), dict(made.export_hf_weights(model))
    same = [name for name in before if name in after and torch.equal(before[name], after[name].to(before[name].dtype))]

    tokens, positions = tiny.batch()
    # In fp32: transformers' own bf16 leaves some of its products with two dtypes.
    theirs = DeepseekV4ForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        ours = model[0].eval()(input_ids=tokens, position_ids=positions, attention_mask=None).float().log_softmax(-1)
        other = theirs(tokens).logits.float().log_softmax(-1)
    picked = [log.reshape(-1, log.shape[-1])[:-1].gather(1, tokens[0, 1:, None]).flatten() for log in (ours, other)]
    return {
        "tensors": len(before),
        "extra": sorted(set(after) - set(before)),
        "same": len(same),
        "pearson": torch.corrcoef(torch.stack(picked))[0, 1].item(),
        "difference": (picked[0] - picked[1]).abs().mean().item(),
    }


if __name__ == "__main__":
    cpu_megatron.before_import()
    folder = Path(sys.argv[4])
    answer = globals()[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]), folder)
    (folder / f"{sys.argv[2]}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()
