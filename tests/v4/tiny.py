"""A true DeepSeek-V4 that a CPU can train: every kind of layer, 1.7 million parameters."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 512
LENGTH = 256
"""Tokens; compression by 128 does nothing in a sequence below 128."""
HASH_LAYERS = 2
RATIOS = (0, 0, 4, 128, 4)
"""Compression per layer: sliding window only, and both kinds of compressed attention."""


def config(**fields: Any) -> Any:
    """Megatron's configuration; `fields` come last, so that a profile's own values are what is built."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    layers, mtp = len(RATIOS), fields.get("mtp_num_layers") or 0
    values: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "multi_latent_attention": True,
        "experimental_attention_variant": "dsv4_hybrid",
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "v_head_dim": 64,
        "qk_pos_emb_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "rope_type": "yarn",
        "rotary_base": 10000,
        "rotary_scaling_factor": 16.0,
        "original_max_position_embeddings": 65536,
        "mscale_all_dim": 1.0,
        "apply_rope_fusion": False,
        "csa_compress_rotary_base": 160000.0,
        "csa_compress_ratios": [*RATIOS, *[0] * mtp],
        "csa_window_size": 32,
        "dsa_indexer_n_heads": 4,
        "dsa_indexer_head_dim": 32,
        "dsa_indexer_topk": 16,
        "enable_hyper_connections": True,
        "num_residual_streams": 4,
        "mhc_sinkhorn_iterations": 20,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "activation_func_clamp_value": 10.0,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 64,
        "moe_router_topk": 2,
        "moe_layer_freq": [1] * layers,
        "moe_shared_expert_intermediate_size": 64,
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_router_topk_scaling_factor": 1.5,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "moe_n_hash_layers": HASH_LAYERS,
        "actual_vocab_size": VOCABULARY,
        "use_cpu_initialization": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }
    return MLATransformerConfig(**{**values, **fields})


def model(made: Any, pre_process: bool = True, post_process: bool = True) -> Any:
    """The model, or one stage of a pipeline, with what V4 keeps in fp32 kept so."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    spec = specs.get_transformer_block_with_experimental_attention_variant_spec(made)
    mtp = None
    if made.mtp_num_layers and post_process:
        provider = specs._get_backend_spec_provider(made)
        mtp = get_gpt_mtp_block_spec_for_backend(made, spec.layer_specs[-1], provider)
    torch.manual_seed(0)
    built = GPTModel(
        made,
        spec,
        VOCABULARY,
        4096,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )
    return Float16Module(made, built)


def batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions of one sequence."""
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.arange(LENGTH).unsqueeze(0)


def packed(lengths: tuple[int, ...] = (100, 156)) -> Any:
    """The same tokens as several samples one after another (THD)."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def forward(built: Any, packed_seq: Any = None, seed: int = 1) -> torch.Tensor:
    """The loss of each next token; on a stage that is not the last, its activations."""
    tokens, positions = batch(seed)
    out: torch.Tensor = built(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=None,
        labels=tokens.roll(-1, 1),
        packed_seq_params=packed_seq,
    )
    return out


def loss(built: Any, packed_seq: Any = None, seed: int = 1) -> torch.Tensor:
    """The mean loss of the next token."""
    return forward(built, packed_seq, seed).float().mean()
