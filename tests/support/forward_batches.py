"""Builds a `ForwardBatch` from stretches of sequences, and runs a token sequence through a backend in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ropeway.backends.batch import Backend, BlockTables, Float32Array, ForwardBatch


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one sequence, the first at position start; block_ids: the sequence's whole block table."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]


def forward_batch(stretches: Sequence[Stretch], *, last_rows_only: bool = False) -> ForwardBatch:
    """A step of one row per stretch and one cache group, with the logits of every token or only of each row's last."""
    lengths = [len(stretch.token_ids) for stretch in stretches]
    table_sizes = [len(stretch.block_ids) for stretch in stretches]
    indptr = np.cumsum([0, *lengths])
    tables = BlockTables(
        block_ids=np.concatenate([np.asarray(s.block_ids) for s in stretches]).astype(np.int32),
        offsets=(np.cumsum(table_sizes) - table_sizes).astype(np.int64),
    )
    return ForwardBatch(
        token_ids=np.concatenate([np.asarray(s.token_ids) for s in stretches]).astype(np.int32),
        positions=np.concatenate([np.arange(s.start, s.start + len(s.token_ids)) for s in stretches]).astype(np.int32),
        query_indptr=indptr.astype(np.int32),
        kv_lens=np.array([s.start + len(s.token_ids) for s in stretches], np.int32),
        tables=(tables,),
        out_rows=(indptr[1:] - 1 if last_rows_only else np.arange(indptr[-1])).astype(np.int32),
    )


def all_logits(
    backend: Backend, token_ids: Sequence[int], *, chunk_size: int | None = None, block_ids: Sequence[int] | None = None
) -> Float32Array:
    """logits[T, vocab] after each token, chunk_size tokens a step (default: all at once), over the given blocks."""
    chunks = logits_by_chunk(backend, token_ids, chunk_size=chunk_size or len(token_ids), block_ids=block_ids)
    return np.concatenate(list(chunks))


def logits_by_chunk(
    backend: Backend, token_ids: Sequence[int], *, chunk_size: int, block_ids: Sequence[int] | None = None
) -> Iterator[Float32Array]:
    """The same, a chunk at a time, so that long texts and large vocabularies need little memory."""
    num_blocks = -(-len(token_ids) // backend.block_size)
    table = list(range(num_blocks)) if block_ids is None else list(block_ids)
    for start in range(0, len(token_ids), chunk_size):
        chunk = token_ids[start : start + chunk_size]
        blocks_needed = -(-(start + len(chunk)) // backend.block_size)
        yield backend.forward(forward_batch([Stretch(chunk, start, table[:blocks_needed])])).copy()
