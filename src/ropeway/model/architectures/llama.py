"""The Llama family (Touvron et al. 2023; Llama 3, Grattafiori et al. 2024): RMSNorm, rope, grouped-query attention,
SwiGLU.

GGUF stores the rows of q and k permuted so that rope's pairs lie side by side: hence `interleaved`.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet

from ropeway.errors import ModelFileError
from ropeway.model.config import ModelConfig
from ropeway.model.program import (
    Add,
    Attention,
    Axis,
    CacheGroup,
    Embed,
    GatedAct,
    KvWrite,
    Linear,
    Logits,
    Norm,
    Op,
    Program,
    Rope,
    SelectRows,
    Weight,
)


def llama(config: ModelConfig, tensor_names: AbstractSet[str]) -> Program:
    """The Program of a Llama-shaped model.

    Optional, and used where `tensor_names` has them: a bias for each linear, `output.weight` (else the head is the
    embedding) and `rope_freqs.weight` (Llama 3's frequency factors). Raises ModelFileError where the last layer is
    missing.
    """
    # Before the loop: a hostile layer count must not cost time or memory.
    if config.num_layers > len(tensor_names):
        raise ModelFileError(
            f"the file declares {config.num_layers} layers and has {len(tensor_names)} tensors; fetch a complete model "
            "file"
        )
    if f"blk.{config.num_layers - 1}.attn_norm.weight" not in tensor_names:
        raise ModelFileError(
            f"the file declares {config.num_layers} layers, but layer {config.num_layers - 1} has no attn_norm.weight; "
            "fetch a complete model file"
        )
    embedding = Weight("token_embd.weight", (config.vocab_size, config.hidden_size), ("vocab", "embed"))
    head = embedding
    if "output.weight" in tensor_names:
        head = Weight("output.weight", (config.vocab_size, config.hidden_size), ("vocab", "embed"))
    ops: list[Op] = [Embed("x", embedding)]
    for layer in range(config.num_layers):
        ops += _attention(config, tensor_names, layer)
        ops += _feed_forward(config, tensor_names, layer)
    ops += [
        SelectRows("last", "x"),
        Norm("last", "last", _norm_weight(config, "output_norm"), config.norm_eps),
        Logits("last", head),
    ]
    return Program(
        ops=tuple(ops),
        buffers=_buffers(config),
        cache_groups=(CacheGroup(tuple(range(config.num_layers)), config.num_kv_heads, config.head_dim),),
        vocab_size=config.vocab_size,
        context_length=config.context_length,
    )


def _attention(config: ModelConfig, tensor_names: AbstractSet[str], layer: int) -> list[Op]:
    """x += Wo attention(rope(Wq h), rope(Wk h), Wv h), h = norm(x)."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def linear(out: str, x: str, name: str, shape: tuple[int, int], axes: tuple[Axis, Axis]) -> Linear:
        return _linear(tensor_names, out, x, Weight(f"blk.{layer}.{name}.weight", shape, axes))

    def rope(x: str, num_heads: int) -> Rope:
        return _rope(config, tensor_names, x, num_heads)

    return [
        Norm("h", "x", _norm_weight(config, f"blk.{layer}.attn_norm"), config.norm_eps),
        linear("q", "h", "attn_q", (q_width, hidden), ("heads", "embed")),
        linear("k", "h", "attn_k", (kv_width, hidden), ("kv_heads", "embed")),
        linear("v", "h", "attn_v", (kv_width, hidden), ("kv_heads", "embed")),
        rope("q", config.num_heads),
        rope("k", config.num_kv_heads),
        KvWrite("k", "v", layer, group=0),
        Attention("a", "q", layer, 0, config.num_heads, config.num_kv_heads, head_dim, 1.0 / math.sqrt(head_dim)),
        linear("h", "a", "attn_output", (hidden, q_width), ("embed", "heads")),
        Add("x", "x", "h"),
    ]


def _feed_forward(config: ModelConfig, tensor_names: AbstractSet[str], layer: int) -> list[Op]:
    """x += Wdown (silu(Wgate h) * Wup h), h = norm(x)."""
    hidden, width = config.hidden_size, config.intermediate_size

    def linear(out: str, x: str, name: str, shape: tuple[int, int], axes: tuple[Axis, Axis]) -> Linear:
        return _linear(tensor_names, out, x, Weight(f"blk.{layer}.{name}.weight", shape, axes))

    return [
        Norm("h", "x", _norm_weight(config, f"blk.{layer}.ffn_norm"), config.norm_eps),
        linear("gate", "h", "ffn_gate", (width, hidden), ("ff", "embed")),
        linear("up", "h", "ffn_up", (width, hidden), ("ff", "embed")),
        GatedAct("gate", "gate", "up", "silu"),
        linear("h", "gate", "ffn_down", (hidden, width), ("embed", "ff")),
        Add("x", "x", "h"),
    ]


def _linear(tensor_names: AbstractSet[str], out: str, x: str, weight: Weight) -> Linear:
    bias_name = weight.name.removesuffix("weight") + "bias"
    has_bias = bias_name in tensor_names
    return Linear(out, x, weight, Weight(bias_name, weight.shape[:1], weight.axes[:1]) if has_bias else None)


def _rope(config: ModelConfig, tensor_names: AbstractSet[str], x: str, num_heads: int) -> Rope:
    factors = None
    if "rope_freqs.weight" in tensor_names:
        factors = Weight("rope_freqs.weight", (config.rotary_dim // 2,), ("head_dim",))
    return Rope(
        x,
        num_heads=num_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim,
        base=config.rope_base,
        pairing="interleaved",
        freq_factors=factors,
        position_divisor=config.rope_factor,
    )


def _norm_weight(config: ModelConfig, name: str) -> Weight:
    return Weight(f"{name}.weight", (config.hidden_size,), ("embed",))


def _buffers(config: ModelConfig) -> dict[str, int]:
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "x": config.hidden_size,
        "h": config.hidden_size,
        "q": q_width,
        "k": kv_width,
        "v": kv_width,
        "a": q_width,
        "gate": config.intermediate_size,
        "up": config.intermediate_size,
        "last": config.hidden_size,
    }
