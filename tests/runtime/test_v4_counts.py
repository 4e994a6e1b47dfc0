"""The planner's parameters of DeepSeek-V4 are those of transformers' own model, built without memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from warm_python import WarmPython

from dsv4kit.config.loading import load_settings
from dsv4kit.config.schema import Geometry
from dsv4kit.plan.counted import geometry as geo

COUNT = """
import json, sys, torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

shape = json.loads(sys.argv[1])
layers = shape["num_layers"]
config = DeepseekV4Config(
    vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"], num_hidden_layers=layers,
    moe_intermediate_size=shape["moe_intermediate_size"], num_attention_heads=shape["num_attention_heads"],
    head_dim=shape["head_dim"], q_lora_rank=shape["q_lora_rank"], num_experts_per_tok=shape["experts_per_token"],
    n_routed_experts=shape["num_experts"], n_shared_experts=shape["shared_experts"], o_groups=shape["o_groups"],
    o_lora_rank=shape["o_lora_rank"], index_n_heads=shape["index_heads"], index_head_dim=shape["index_head_dim"],
    hc_mult=shape["hyper_connections"], sliding_window=shape["sliding_window"],
    compress_ratios=shape["compress_ratios"][:layers], num_hash_layers=shape["hash_layers"], qk_rope_head_dim=64,
)
with torch.device("meta"):
    model = DeepseekV4ForCausalLM(config)
own = [0] * layers
for name, parameter in model.named_parameters():
    if name.startswith("model.layers."):
        own[int(name.split(".")[2])] += parameter.numel()
print(json.dumps({"all": sum(p.numel() for p in model.parameters()), "layers": own}))
"""


@pytest.mark.parametrize("model", ["dsv4-pro", "dsv4-flash", "dsv4-flash-4l"])
def test_every_layer_and_their_sum(warm: WarmPython, model: str) -> None:
    shape = load_settings("h100", model, "grpo").settings.model.geometry
    assert isinstance(shape, Geometry)
    ran = warm.run(COUNT, json.dumps(shape.model_dump()))
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    fields = shape.model_dump()
    planned = geo.ModelShape(**{**fields, "compress_ratios": tuple(fields["compress_ratios"])})
    layers = [geo.layer_dense_params(planned, r) + geo.layer_expert_params(planned) for r in planned.layer_ratios]
    assert found["layers"] == layers
    assert found["all"] == geo.totals(planned).main
