"""The reference backend: numpy, float32, slow and obvious; the oracle of every other backend.

Weights are dequantised to float32 once. Nothing here is fused, tiled or reordered: each op is the formula of its
docstring in `model.program`. Knows no scheduling and no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from ropeway.backends.batch import (
    BlockTables,
    Float32Array,
    ForwardBatch,
    ForwardRows,
    Int32Array,
    Int64Array,
    LayerSlice,
    Logprobs,
    SampleRows,
    Samples,
    ScoreBatch,
)
from ropeway.backends.reference_sampler import sample_reference, score_reference
from ropeway.errors import ConfigError
from ropeway.model.program import (
    Add,
    Attention,
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
from ropeway.model.weights import Tensor, dequantize

KvDtype = Literal["f32", "f16"]


class ReferenceBackend:
    """A Program run op by op in float32, over a paged KV cache of num_kv_blocks blocks of block_size tokens.

    kv_dtype: how keys and values are stored between ops; "f16" rounds them as the native backend does by default.
    Raises ConfigError for a pool without blocks.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        *,
        num_kv_blocks: int,
        block_size: int = 16,
        kv_dtype: KvDtype = "f16",
    ) -> None:
        if num_kv_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"the KV pool needs blocks, not {num_kv_blocks} of {block_size} tokens; ask for at least one"
            )
        self._program = program
        self._num_kv_blocks = num_kv_blocks
        self._block_size = block_size
        self._weights = {name: dequantize(tensors[name]) for name in program.weights}
        storage = np.dtype(np.float16 if kv_dtype == "f16" else np.float32)
        self._kept: dict[str, Float32Array] = {}  # the buffers of a sliced row between its steps
        self._keys, self._values = {}, {}  # layer -> [blocks, block_size, num_kv_heads, head_dim]
        for group in program.cache_groups:
            shape = (num_kv_blocks, block_size, group.num_kv_heads, group.head_dim)
            for layer in group.layers:
                self._keys[layer] = np.zeros(shape, storage)
                self._values[layer] = np.zeros(shape, storage)

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @property
    def num_kv_blocks(self) -> int:
        return self._num_kv_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_layers(self) -> int:
        return max(1, sum(isinstance(op, Attention) for op in self._program.ops))

    def copy_blocks(self, group: int, source_ids: Int32Array, destination_ids: Int32Array) -> None:
        """Copies whole blocks of a cache group, pair after pair."""
        for layer in self._program.cache_groups[group].layers:
            for cache in (self._keys[layer], self._values[layer]):
                for source, destination in zip(source_ids, destination_ids, strict=True):
                    cache[destination] = cache[source]

    def forward(self, batch: ForwardRows) -> Float32Array:
        """logits[R, vocab] of the rows that `batch` asks for; the KV cache gains the batch's tokens."""
        if batch.layer_slice is None:
            return self._run_ops(self._program.ops, {}, batch)
        return self._forward_sliced(batch, batch.layer_slice)

    def _forward_sliced(self, batch: ForwardRows, layer_slice: LayerSlice) -> Float32Array:
        """The rows before the last pass every layer, and then the last those of the slice."""
        before, last = _without_last_row(batch), _last_row(batch)
        ops_before = self._program.ops if len(before.token_ids) else ()
        logits = self._run_ops(ops_before, {}, before)
        if layer_slice.index == 0:
            self._kept = {}
        first, end = layer_slice.bounds(self.num_layers)
        starts = [0, *[i + 1 for i, op in enumerate(self._program.ops) if isinstance(op, Attention)]]
        ops = self._program.ops[starts[first] : None if layer_slice.is_last else starts[end]]
        last_logits = self._run_ops(ops, self._kept, last)
        return np.concatenate([logits, last_logits]) if layer_slice.is_last else logits

    def _run_ops(self, ops: Sequence[Op], buffers: dict[str, Float32Array], batch: ForwardRows) -> Float32Array:
        """Runs ops over `buffers`; the logits, of no rows where ops have none."""
        slots = [self._slots(batch, group) for group in range(len(self._program.cache_groups))]
        for op in ops:
            if isinstance(op, Logits):
                return self._linear(buffers[op.x], op.weight, None)
            self._run(op, buffers, batch, slots)
        return np.empty((0, self.vocab_size), np.float32)

    def sample(self, logits: Float32Array, batch: SampleRows) -> Samples:
        """One token per row of the batch; its rows of logits[R, vocab] are changed in place."""
        return sample_reference(logits, batch)

    def score(self, logits: Float32Array, batch: ScoreBatch) -> Logprobs:
        """Log-probabilities of known tokens by rows of logits[R, vocab]."""
        return score_reference(logits, batch)

    def _run(self, op: Op, buffers: dict[str, Float32Array], batch: ForwardRows, slots: list[list[Int64Array]]) -> None:
        match op:
            case Embed():
                buffers[op.out] = self._weights[op.weight.name][batch.token_ids]
            case Norm():
                buffers[op.out] = _rms_norm(buffers[op.x], self._weights[op.weight.name], op.eps)
            case Linear():
                buffers[op.out] = self._linear(buffers[op.x], op.weight, op.bias)
            case Rope():
                buffers[op.x] = self._rope(op, buffers[op.x], batch.positions)
            case KvWrite():
                self._write(op, buffers, batch, slots[op.group])
            case Attention():
                buffers[op.out] = self._attention(op, buffers[op.q], batch, slots[op.group])
            case GatedAct():
                buffers[op.out] = _silu(buffers[op.gate]) * buffers[op.up]
            case Add():
                buffers[op.out] = buffers[op.a] + buffers[op.b]
            case SelectRows():
                buffers[op.out] = buffers[op.x][batch.out_rows]
            case _:
                raise AssertionError(f"{type(op).__name__} has no meaning here")

    def _linear(self, x: Float32Array, weight: Weight, bias: Weight | None) -> Float32Array:
        out: Float32Array = x @ self._weights[weight.name].T
        return out if bias is None else out + self._weights[bias.name]

    def _rope(self, op: Rope, x: Float32Array, positions: Int32Array) -> Float32Array:
        """x[T, num_heads * head_dim] turned; angles in float64, so that far positions keep their place."""
        frequencies = op.base ** (-np.arange(0, op.rotary_dim, 2) / op.rotary_dim) / op.position_divisor
        if op.freq_factors is not None:
            frequencies = frequencies / self._weights[op.freq_factors.name]
        angles = positions[:, None, None] * frequencies  # [T, 1, rotary_dim / 2]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        heads = x.reshape(len(x), op.num_heads, op.head_dim).copy()
        half = op.rotary_dim // 2
        first, second = (
            (slice(0, op.rotary_dim, 2), slice(1, op.rotary_dim, 2))
            if op.pairing == "interleaved"
            else (slice(0, half), slice(half, op.rotary_dim))
        )
        a, b = heads[..., first].copy(), heads[..., second].copy()
        heads[..., first] = a * cos - b * sin
        heads[..., second] = a * sin + b * cos
        return heads.reshape(x.shape)

    def _slots(self, batch: ForwardRows, group: int) -> list[Int64Array]:
        """Per sequence, the cache slot of each of its positions 0 .. kv_len - 1."""
        table = batch.tables[group]
        slots = []
        for offset, kv_len in zip(table.offsets, batch.kv_lens, strict=True):
            block, place = np.divmod(np.arange(kv_len), self._block_size)
            slots.append(table.block_ids[offset + block].astype(np.int64) * self._block_size + place)
        return slots

    def _write(
        self, op: KvWrite, buffers: dict[str, Float32Array], batch: ForwardRows, slots: list[Int64Array]
    ) -> None:
        for cache, name in ((self._keys[op.layer], op.k), (self._values[op.layer], op.v)):
            rows = cache.reshape(-1, *cache.shape[2:])  # [slots, num_kv_heads, head_dim]
            new = buffers[name].reshape(-1, *cache.shape[2:])
            for s, (start, end) in enumerate(zip(batch.query_indptr[:-1], batch.query_indptr[1:], strict=True)):
                rows[slots[s][batch.positions[start:end]]] = new[start:end]

    def _attention(self, op: Attention, q: Float32Array, batch: ForwardRows, slots: list[Int64Array]) -> Float32Array:
        keys, values = self._keys[op.layer], self._values[op.layer]
        group_size = op.num_heads // op.num_kv_heads
        queries = q.reshape(len(q), op.num_kv_heads, group_size, op.head_dim)
        out = np.empty_like(queries)
        for s, (start, end) in enumerate(zip(batch.query_indptr[:-1], batch.query_indptr[1:], strict=True)):
            k = keys.reshape(-1, *keys.shape[2:])[slots[s]].astype(np.float32)  # [kv_len, num_kv_heads, head_dim]
            v = values.reshape(-1, *values.shape[2:])[slots[s]].astype(np.float32)
            is_hidden = np.arange(len(k)) > batch.positions[start:end, None]  # [queries, kv_len]
            for head in range(op.num_kv_heads):
                for member in range(group_size):
                    scores = queries[start:end, head, member] @ k[:, head].T * np.float32(op.scale)
                    scores[is_hidden] = -np.inf
                    out[start:end, head, member] = _softmax(scores) @ v[:, head]
        return out.reshape(len(q), -1)


def _without_last_row(batch: ForwardRows) -> ForwardBatch:
    num_tokens = batch.query_indptr[-2]
    return ForwardBatch(
        token_ids=batch.token_ids[:num_tokens],
        positions=batch.positions[:num_tokens],
        query_indptr=batch.query_indptr[:-1],
        kv_lens=batch.kv_lens[:-1],
        tables=tuple(BlockTables(table.block_ids, table.offsets[:-1]) for table in batch.tables),
        out_rows=batch.out_rows[batch.out_rows < num_tokens],
    )


def _last_row(batch: ForwardRows) -> ForwardBatch:
    first, end = batch.query_indptr[-2:]
    return ForwardBatch(
        token_ids=batch.token_ids[first:],
        positions=batch.positions[first:],
        query_indptr=np.array([0, end - first], np.int32),
        kv_lens=batch.kv_lens[-1:],
        tables=tuple(BlockTables(table.block_ids, table.offsets[-1:]) for table in batch.tables),
        out_rows=batch.out_rows[batch.out_rows >= first] - first,
    )


def _rms_norm(x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: Float32Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def _silu(x: Float32Array) -> Float32Array:
    # exp(-x) overflows to inf for x < -88, where the quotient is the right 0.
    with np.errstate(over="ignore"):
        gated: Float32Array = x / (1 + np.exp(-x))
    return gated


def _softmax(scores: Float32Array) -> Float32Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    normed: Float32Array = weights / weights.sum(axis=-1, keepdims=True)
    return normed
