"""A DeepSeek-V4 saved by transformers, cut by the kit, is a DeepSeek-V4 of four layers to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from warm_python import WarmPython

from dsv4kit.cli import main

MAKE = """
import sys, torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

torch.manual_seed(0)
config = DeepseekV4Config(
    vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=6, num_attention_heads=4, head_dim=32,
    q_lora_rank=16, num_experts_per_tok=2, n_routed_experts=4, o_groups=2, o_lora_rank=16, index_n_heads=2,
    index_head_dim=16, index_topk=4, hc_mult=2, sliding_window=8, compress_ratios=[128, 128, 4, 128, 4, 128, 0],
    num_hash_layers=3, qk_rope_head_dim=8, max_position_embeddings=512,
)
DeepseekV4ForCausalLM(config).save_pretrained(sys.argv[1], max_shard_size="200KB")
"""
COMPARE = """
import json, sys, torch
from transformers import DeepseekV4ForCausalLM

full = dict(DeepseekV4ForCausalLM.from_pretrained(sys.argv[1]).state_dict())
model, said = DeepseekV4ForCausalLM.from_pretrained(sys.argv[2], output_loading_info=True)
print(json.dumps({
    "problems": [str(problem) for problem in said.values() if problem],
    "layers": len(model.model.layers),
    "kinds": model.config.mlp_layer_types,
    "differ": [name for name, value in model.state_dict().items() if not torch.equal(full[name], value)],
    "logits": list(model(torch.arange(16)[None]).logits.shape),
}))
"""


def test_transformers_reads_the_cut_checkpoint(warm: WarmPython, tmp_path: Path) -> None:
    def run(script: str, *words: Path) -> str:
        ran = warm.run(script, *words)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return ran.stdout

    full, four = tmp_path / "full", tmp_path / "four"
    run(MAKE, full)
    assert main.run(["proxy-weights", f"--from={full}", f"--out={four}", "--no-mtp"]) == 0
    found: dict[str, Any] = json.loads(run(COMPARE, full, four))
    assert found == {
        "problems": [],
        "layers": 4,
        "kinds": ["hash_moe", "hash_moe", "hash_moe", "moe"],
        "differ": [],
        "logits": [1, 16, 64],
    }
