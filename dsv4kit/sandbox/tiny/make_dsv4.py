"""Makes a tiny true DeepSeek-V4 to train on a CPU, its tokenizer, and toy conversations. No download.

    python make_dsv4.py OUT_DIR            (the Python of the CPU runtime: torch, transformers, pyarrow)

OUT_DIR/
  model/         5 layers with every kind of attention, 2 with hash routing, 8 experts, 4 residual streams; 1.7 million
                 random bf16 parameters under the released checkpoints' tensor names; the toy model's tokenizer
  sft.parquet    conversations of 130 tokens and more: compression by 128 does nothing in shorter ones

The same bytes on every run. OUT_DIR appears complete or not at all; one that exists is left as it is.
"""

from __future__ import annotations

import os
import random
import re
import sys
from pathlib import Path

import make_assets

SEED = 20260101
ROWS = 256
QUESTIONS = 4
"""In one conversation."""

RATIOS = [0, 0, 4, 128, 4]
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": len(RATIOS),
    "num_attention_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "hc_mult": 4,
    "sliding_window": 32,
    "compress_ratios": RATIOS,
    "num_hash_layers": 2,
    "qk_rope_head_dim": 16,
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 0,
    # As the released configurations; Megatron-Bridge reads factor and original length.
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}

# transformers' names of tensors -> the released checkpoints', in this order (both read the latter).
RELEASED = (
    (r"^model\.", ""),
    (r"^lm_head\.", "head."),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.self_attn\.compressor\.indexer\.(gate_proj|kv_norm|kv_proj|position_bias)", r".attn.indexer.compressor.\1"),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj", ".attn.indexer.wq_b"),
    (r"\.self_attn\.compressor\.indexer\.scorer\.", ".attn.indexer."),
    (r"\.self_attn\.", ".attn."),
    (r"compressor\.gate_proj", "compressor.wgate"),
    (r"compressor\.kv_norm", "compressor.norm"),
    (r"compressor\.kv_proj", "compressor.wkv"),
    (r"compressor\.position_bias", "compressor.ape"),
    (r"\.attn\.kv_proj", ".attn.wkv"),
    (r"\.attn\.o_([ab])_proj", r".attn.wo_\1"),
    (r"\.attn\.q_a_norm", ".attn.q_norm"),
    (r"\.attn\.q_([ab])_proj", r".attn.wq_\1"),
    (r"\.attn\.sinks", ".attn.attn_sink"),
    (r"\.mlp\.", ".ffn."),
    (r"\.gate\.e_score_correction_bias", ".gate.bias"),
    (r"shared_experts\.gate_proj", "shared_experts.w1"),
    (r"shared_experts\.down_proj", "shared_experts.w2"),
    (r"shared_experts\.up_proj", "shared_experts.w3"),
)


def released(name: str) -> str:
    """The name a tensor of transformers has in a released checkpoint."""
    for pattern, replacement in RELEASED:
        name = re.sub(pattern, replacement, name)
    return name


def conversations() -> list[dict[str, object]]:
    """Several sums in one question, the last one's answer."""
    rng = random.Random(f"{SEED} dsv4")
    table: list[dict[str, object]] = []
    for row in range(ROWS):
        asked = [make_assets.question(rng, row * QUESTIONS + number) for number in range(QUESTIONS)]
        turns = [
            {"role": "user", "content": " ".join(text for text, _ in asked)},
            {"role": "assistant", "content": f"#### {asked[-1][1]}"},
        ]
        table.append({"messages": turns})
    return table


def write_model(folder: Path) -> None:
    """Tokenizer, and random weights in the released layout."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    tokenizer = make_assets.write_tokenizer(folder)
    torch.manual_seed(SEED)
    config = DeepseekV4Config(
        **SHAPE, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model = DeepseekV4ForCausalLM(config)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # which experts a token goes to: different ones, not all to the first
                rows = [torch.randperm(config.n_routed_experts)[: buffer.shape[1]] for _ in range(buffer.shape[0])]
                buffer.copy_(torch.stack(rows))
        for name, parameter in model.named_parameters():
            if "norm" not in name:  # transformers leaves hyper-connections and biases at zero or one
                parameter.add_(torch.randn_like(parameter) * config.initializer_range)
    model.to(torch.bfloat16).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {released(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def fill(folder: Path) -> None:
    """Everything, into a directory that is there."""
    write_model(folder / "model")
    make_assets.write_table(conversations(), folder / "sft.parquet")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} OUT_DIR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make_assets.make(Path(sys.argv[1]), fill)
