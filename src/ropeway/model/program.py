"""A model as a Program: a short list of ops over named buffers. Backends execute it; architectures write it.

Shapes use T tokens in the step, R selected rows, and the widths of the model. A buffer is a float32 matrix with one
row per token (or per selected row after `SelectRows`); an op names the buffers it reads and the one it writes.
Weights are named; a weight's logical axes (`embed`, `heads`, `kv_heads`, `ff`, `vocab`) say what may be sharded or
fused, and are the backend's business. q, k, v, gate and up stay separate linears: fusing them is a pass of a backend.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Axis = Literal["embed", "heads", "kv_heads", "ff", "vocab", "head_dim"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor by its name in the model file. Row-major: shape[0] outputs (or rows), shape[1] inputs."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table; `full` keeps every position.

    One K and one V row of width num_kv_heads x head_dim per token and layer.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    kind: Literal["full"] = "full"


@dataclass(frozen=True, slots=True)
class Embed:
    """out[T, embed] = weight[token_ids]."""

    out: str
    weight: Weight  # [vocab, embed]


@dataclass(frozen=True, slots=True)
class Norm:
    """out = x / sqrt(mean(x^2) + eps) * weight, per row (RMSNorm, Zhang & Sennrich 2019)."""

    out: str
    x: str
    weight: Weight  # [embed]
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """out[rows, N] = x[rows, K] @ weight[N, K]^T + bias[N]."""

    out: str
    x: str
    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates x in place, per head of width head_dim, over its first `rotary_dim` entries (RoFormer, Su et al. 2021).

    Pair i turns by position / position_divisor * base^(-2i / rotary_dim) / freq_factors[i]. `interleaved`: pair i is
    entries (2i, 2i+1), as GGUF stores Llama; `half`: entries (i, i + rotary_dim/2).
    """

    x: str
    num_heads: int
    head_dim: int
    rotary_dim: int
    base: float
    pairing: Literal["interleaved", "half"]
    freq_factors: Weight | None = None  # [rotary_dim / 2]
    position_divisor: float = 1.0  # linear scaling (Chen et al. 2023)


@dataclass(frozen=True, slots=True)
class KvWrite:
    """Stores k[T, num_kv_heads * head_dim] and v, rounded to the cache's type, at each token's slot of `layer`."""

    k: str
    v: str
    layer: int
    group: int


@dataclass(frozen=True, slots=True)
class Attention:
    """out[T, num_heads * head_dim]: causal softmax(q . k * scale) @ v over the cached keys of positions 0..own.

    Query head h reads KV head h // (num_heads / num_kv_heads).
    """

    out: str
    q: str
    layer: int
    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class GatedAct:
    """out[T, ff] = act(gate) * up; silu(x) = x / (1 + exp(-x))."""

    out: str
    gate: str
    up: str
    act: Literal["silu"]


@dataclass(frozen=True, slots=True)
class Add:
    """out = a + b, elementwise; `out` may be `a` or `b`."""

    out: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class SelectRows:
    """out[R] = x[out_rows]: everything after it runs on the rows whose logits are wanted."""

    out: str
    x: str


@dataclass(frozen=True, slots=True)
class Logits:
    """The program's result: logits[R, vocab] = x[R, embed] @ weight[vocab, embed]^T."""

    x: str
    weight: Weight


Op = Embed | Norm | Linear | Rope | KvWrite | Attention | GatedAct | Add | SelectRows | Logits


@dataclass(frozen=True, slots=True)
class Program:
    """buffers: name -> width (columns). ops run in order. `context_length`: positions the model was trained for."""

    ops: tuple[Op, ...]
    buffers: dict[str, int]
    cache_groups: tuple[CacheGroup, ...]
    vocab_size: int
    context_length: int

    @property
    def weights(self) -> dict[str, Weight]:
        """Every weight that the ops read, by name, in the order of first use."""
        found: dict[str, Weight] = {}
        for op in self.ops:
            for field in fields(op):
                value = getattr(op, field.name)
                if isinstance(value, Weight):
                    found.setdefault(value.name, value)
        return found
