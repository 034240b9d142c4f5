"""The fake backend catches what it is there to catch."""

from __future__ import annotations

import numpy as np
import pytest

from ropeway.backends.batch import BlockTables, Float32Array, ForwardBatch
from support.batches import sample_batch
from support.fake_backend import BlockTableCorruption, FakeBackend

Row = tuple[list[int], int, list[int]]  # tokens to compute, position of the first, block table


def forward(backend: FakeBackend, *rows: Row) -> list[int]:
    return np.argmax(logits(backend, *rows), axis=1).tolist()


def logits(backend: FakeBackend, *rows: Row) -> Float32Array:
    lengths = [len(tokens) for tokens, _, _ in rows]
    indptr = np.cumsum([0, *lengths], dtype=np.int32)
    return backend.forward(
        ForwardBatch(
            token_ids=np.array([t for tokens, _, _ in rows for t in tokens], dtype=np.int32),
            positions=np.array([p + i for tokens, p, _ in rows for i in range(len(tokens))], dtype=np.int32),
            query_indptr=indptr,
            kv_lens=np.array([p + len(tokens) for tokens, p, _ in rows], dtype=np.int32),
            tables=(
                BlockTables(
                    block_ids=np.array([b for _, _, blocks in rows for b in blocks], dtype=np.int32),
                    offsets=np.cumsum([0, *(len(blocks) for _, _, blocks in rows)], dtype=np.int64)[:-1],
                ),
            ),
            out_rows=indptr[1:] - 1,
        )
    )


def test_tokens_do_not_depend_on_chunks_or_blocks() -> None:
    backend = FakeBackend(num_kv_blocks=8, block_size=4)
    prompt = [3, 1, 4, 1, 5, 9]
    (whole,) = forward(backend, (prompt, 0, [0, 1]))
    forward(backend, (prompt[:3], 0, [5]))
    (chunked,) = forward(backend, (prompt[3:], 3, [5, 2]))
    assert whole == chunked == backend.expected_tokens(prompt, 1)[0]
    assert (backend.num_forwards, backend.num_tokens_computed) == (3, 12)


def test_a_shared_prefix_is_no_corruption() -> None:
    backend = FakeBackend(num_kv_blocks=8, block_size=4)
    forward(backend, ([1, 2, 3, 4, 5], 0, [0, 1]))
    assert forward(backend, ([6], 4, [0, 2])) == list(backend.expected_tokens([1, 2, 3, 4, 6], 1))


@pytest.mark.parametrize(
    "row",
    [
        ([9], 5, [1, 0]),  # wrong order
        ([9], 5, [0, 2]),  # a block that was never written
        ([9], 5, [3, 1]),  # another sequence's block
        ([9], 5, [0, 8]),  # no such block
        ([9], 5, [1, 1]),  # the same block twice
        ([9], 6, [0, 1]),  # a position was skipped
    ],
)
def test_a_wrong_table_raises(row: Row) -> None:
    backend = FakeBackend(num_kv_blocks=8, block_size=4)
    forward(backend, ([1, 2, 3, 4, 5], 0, [0, 1]), ([7, 8, 9, 10], 0, [3]))
    with pytest.raises(BlockTableCorruption):
        forward(backend, row)


def test_a_block_given_to_two_sequences_raises() -> None:
    backend = FakeBackend(num_kv_blocks=8, block_size=4)
    forward(backend, ([1, 2], 0, [0]))
    forward(backend, ([7, 8, 9], 0, [0]))
    with pytest.raises(BlockTableCorruption, match="not from its tokens"):
        backend.sample(logits(backend, ([3], 2, [0])), sample_batch(1, prompts=[[1, 2, 3]]))
    with pytest.raises(BlockTableCorruption, match="same slot"):
        forward(backend, ([1], 0, [4]), ([2], 0, [4]))
