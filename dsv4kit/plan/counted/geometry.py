"""Parameters of a DeepSeek-V4 model, piece by piece.

Shapes: Megatron-LM `deepseek_v4_hybrid_attention.py`, `csa.py`, `hyper_connection.py`; the same in transformers.
The sums agree with what is published to the rounding of the publication (tests/unit/test_geometry.py).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

SWA, CSA, HCA = 0, 4, 128

# Bytes per parameter of the released model: dense matrices FP8 with 128x128 scales, routed experts MXFP4 with a scale
# byte per 32, router, compressors, embedding and head bf16, hyper-connections fp32.
FP8_BYTES, MXFP4_BYTES, BF16_BYTES, FP32_BYTES = 1 + 1 / 128**2, 0.5 + 1 / 32, 2, 4


class ModelShape(NamedTuple):
    """Shape of one model; field names after its `config.json`. `compress_ratios` has the MTP layers last."""

    num_layers: int
    mtp_layers: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_heads: int
    index_head_dim: int
    num_experts: int
    shared_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    hash_layers: int
    compress_ratios: tuple[int, ...]
    sliding_window: int
    hyper_connections: int
    vocab_size: int

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compression ratio of each decoder layer."""
        return self.compress_ratios[: self.num_layers]


def compressor_params(g: ModelShape, ratio: int, width: int) -> int:
    """KV compressor: two projections h -> c*width, a learned position per slot, a norm; c = 2 where windows overlap."""
    if ratio == SWA:
        return 0
    c = 2 if ratio == CSA else 1
    return 2 * g.hidden_size * c * width + ratio * c * width + width


def attention_core_params(g: ModelShape) -> int:
    """wq_a, wq_b, wkv (one shared K=V head), grouped wo_a, wo_b, and each head's sink (transformers' parameters)."""
    heads = g.num_attention_heads * g.head_dim
    return (
        g.hidden_size * g.q_lora_rank
        + g.q_lora_rank * heads
        + g.hidden_size * g.head_dim
        + g.o_lora_rank * heads
        + g.o_groups * g.o_lora_rank * g.hidden_size
        + g.num_attention_heads
    )


def indexer_params(g: ModelShape, ratio: int) -> int:
    """The token selector of sparse layers: its own queries, head weights and compressor."""
    if ratio != CSA:
        return 0
    queries = g.q_lora_rank * g.index_heads * g.index_head_dim
    return queries + g.hidden_size * g.index_heads + compressor_params(g, ratio, g.index_head_dim)


def hyper_connection_params(g: ModelShape) -> int:
    """mHC of attention and of the expert layer: a map from all streams to the mixing weights, biases, three gates."""
    mixing = g.hyper_connections * (g.hyper_connections + 2)
    return 2 * (mixing * g.hyper_connections * g.hidden_size + mixing + 3)


def router_params(g: ModelShape) -> int:
    """One score per routed expert; the bias and the hash table are buffers, not parameters."""
    return g.num_experts * g.hidden_size


def expert_params(g: ModelShape) -> int:
    """One routed (or shared) expert: gate, up, down."""
    return 3 * g.hidden_size * g.moe_intermediate_size


def layer_expert_params(g: ModelShape) -> int:
    """All routed experts of one layer."""
    return g.num_experts * expert_params(g)


@lru_cache(maxsize=64)
def layer_dense_params(g: ModelShape, ratio: int) -> int:
    """One layer without its routed experts."""
    norms = 2 * g.hidden_size + g.q_lora_rank + g.head_dim
    return (
        attention_core_params(g)
        + compressor_params(g, ratio, g.head_dim)
        + indexer_params(g, ratio)
        + hyper_connection_params(g)
        + router_params(g)
        + g.shared_experts * expert_params(g)
        + norms
    )


def embedding_params(g: ModelShape) -> int:
    """The token embedding; the head is not tied to it."""
    return g.vocab_size * g.hidden_size


def stream_head_params(g: ModelShape) -> int:
    """hc_head: collapses the residual streams before a head."""
    return g.hyper_connections * (g.hyper_connections * g.hidden_size + 1) + 1


def head_params(g: ModelShape) -> int:
    """Output head, final norm and hc_head."""
    return embedding_params(g) + g.hidden_size + stream_head_params(g)


def mtp_dense_params(g: ModelShape) -> int:
    """One MTP layer without its experts: a sliding-window layer, two projections, norms, hc_head."""
    return layer_dense_params(g, SWA) + 2 * g.hidden_size**2 + 3 * g.hidden_size + stream_head_params(g)


@lru_cache(maxsize=64)
def dense_before(g: ModelShape) -> tuple[int, ...]:
    """Dense parameters of all layers before each one, and last of all of them."""
    return (0, *accumulate(layer_dense_params(g, ratio) for ratio in g.layer_ratios))


@lru_cache(maxsize=64)
def layer_released_bytes(g: ModelShape, ratio: int) -> float:
    """Bytes of one layer's dense part as released and as vLLM holds it."""
    bf16 = router_params(g) + compressor_params(g, ratio, g.head_dim)
    if ratio == CSA:
        bf16 += compressor_params(g, ratio, g.index_head_dim)
    fp32 = hyper_connection_params(g)
    fp8 = layer_dense_params(g, ratio) - bf16 - fp32
    return fp8 * FP8_BYTES + bf16 * BF16_BYTES + fp32 * FP32_BYTES


class Totals(NamedTuple):
    """Sums over the model; `active` counts what one token passes through, without the embedding look-up."""

    main: int
    with_mtp: int
    active: int
    released_bytes: float
    released_with_mtp_bytes: float


@lru_cache(maxsize=64)
def totals(g: ModelShape) -> Totals:
    """Parameters and released bytes of the whole model."""
    dense = sum(layer_dense_params(g, ratio) for ratio in g.layer_ratios)
    main = dense + g.num_layers * layer_expert_params(g) + embedding_params(g) + head_params(g)
    mtp = mtp_dense_params(g) + layer_expert_params(g)
    active = dense + g.num_layers * g.experts_per_token * expert_params(g) + head_params(g)
    experts_bytes = layer_expert_params(g) * MXFP4_BYTES
    released = (
        sum(layer_released_bytes(g, ratio) + experts_bytes for ratio in g.layer_ratios)
        + (embedding_params(g) + head_params(g)) * BF16_BYTES
    )
    projections = mtp_dense_params(g) - layer_dense_params(g, SWA)
    mtp_bytes = layer_released_bytes(g, SWA) + experts_bytes + projections * FP8_BYTES
    return Totals(
        main=main,
        with_mtp=main + g.mtp_layers * mtp,
        active=active,
        released_bytes=released,
        released_with_mtp_bytes=released + g.mtp_layers * mtp_bytes,
    )
