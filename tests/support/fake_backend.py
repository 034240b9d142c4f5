"""A backend without a model: the next token is a hash of all the tokens before it, read back through the block tables.

It owns a toy KV store. Every slot a forward pass writes receives the token, its position, and a running hash of the
sequence up to it. Every forward pass reads the whole history of each row through its block table and checks all three;
`sample` checks that what was read is the history the runner holds. A block granted twice, freed too early, appended in
the wrong order, or left in a table after preemption makes some row disagree: `BlockTableCorruption`. Knows nothing of
schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ropeway.backends.batch import (
    BlockTables,
    Float32Array,
    ForwardBatch,
    Int32Array,
    Logprobs,
    SampleBatch,
    Samples,
    ScoreBatch,
)
from ropeway.backends.reference_sampler import score_reference

UInt64Array = npt.NDArray[np.uint64]


class BlockTableCorruption(AssertionError):
    """What a row reads through its block table is not the history of its sequence."""


def hash_tokens(token_ids: npt.ArrayLike, first_position: int = 0) -> UInt64Array:
    """One hash per (token, position); the hash of a history is their sum modulo 2^64 (splitmix64's finaliser)."""
    tokens = np.asarray(token_ids, dtype=np.uint64)
    positions = np.arange(first_position, first_position + len(tokens), dtype=np.uint64)
    x = (positions << np.uint64(32)) + tokens + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class FakeBackend:
    """A `Backend` (ropeway.backends.batch) of one cache group whose greedy tokens are `expected_tokens`.

    vocab_size: V. Token ids from `first_token_id` up are generated, so tests can keep lower ones for stop tokens.
    next_token: replaces the hash: called with the whole history (tuple of token ids), returns the likeliest token.
    """

    def __init__(
        self,
        *,
        num_kv_blocks: int,
        block_size: int = 16,
        vocab_size: int = 64,
        first_token_id: int = 0,
        next_token: Callable[[tuple[int, ...]], int] | None = None,
    ) -> None:
        self._num_kv_blocks = num_kv_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._first_token_id = first_token_id
        self._next_token = next_token
        self._is_written = np.zeros(num_kv_blocks * block_size, dtype=np.bool_)
        self._tokens = np.zeros(num_kv_blocks * block_size, dtype=np.int32)
        self._positions = np.zeros(num_kv_blocks * block_size, dtype=np.int32)
        self._hashes = np.zeros(num_kv_blocks * block_size, dtype=np.uint64)
        self._histories: list[npt.NDArray[np.int32]] = []  # of the last pass, one per row of its logits
        self.num_forwards = 0
        self.num_blocks_copied = 0
        self.num_tokens_computed = 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def num_kv_blocks(self) -> int:
        return self._num_kv_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_layers(self) -> int:
        return 4

    def expected_tokens(self, prompt_token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """The first `num_tokens` greedy tokens of a prompt, however they are scheduled."""
        history = list(prompt_token_ids)
        for _ in range(num_tokens):
            history.append(self._likeliest(np.asarray(history)))
        return tuple(history[len(prompt_token_ids) :])

    def copy_blocks(self, group: int, source_ids: Int32Array, destination_ids: Int32Array) -> None:
        """Copies what was written to whole blocks, pair after pair."""
        assert group == 0, "the fake backend has one cache group"
        for source, destination in zip(source_ids.tolist(), destination_ids.tolist(), strict=True):
            for column in (self._is_written, self._tokens, self._positions, self._hashes):
                blocks = column.reshape(self._num_kv_blocks, self._block_size)
                blocks[destination] = blocks[source]
        self.num_blocks_copied += len(source_ids)

    def forward(self, batch: ForwardBatch) -> Float32Array:
        """Writes the step's tokens, verifies every row's history, returns logits[R, V] with one peak each."""
        assert len(batch.tables) == 1, "the fake backend has one cache group"
        num_rows = len(batch.kv_lens)
        assert len(batch.query_indptr) == num_rows + 1 and batch.query_indptr[-1] == len(batch.token_ids)
        assert ((batch.token_ids >= 0) & (batch.token_ids < self._vocab_size)).all(), "token id out of range"
        slots = [self._slots(batch.tables[0], row, int(batch.kv_lens[row])) for row in range(num_rows)]
        written = [s[len(s) - n :] for s, n in zip(slots, np.diff(batch.query_indptr), strict=True)]
        all_written = np.concatenate(written)
        if len(np.unique(all_written)) != len(all_written):
            raise BlockTableCorruption(f"two rows of one step write the same slot: {sorted(all_written.tolist())}")
        for row in range(num_rows):
            self._write(batch, row, slots[row], written[row])
        histories = [self._read(row, slots[row]) for row in range(num_rows)]
        self.num_forwards += 1
        self.num_tokens_computed += len(batch.token_ids)

        self._histories = []
        logits = np.zeros((len(batch.out_rows), self._vocab_size), dtype=np.float32)
        row_of = np.searchsorted(batch.query_indptr, batch.out_rows, side="right") - 1
        for r, (row, token) in enumerate(zip(row_of.tolist(), batch.out_rows.tolist(), strict=True)):
            history = histories[row][: int(batch.positions[token]) + 1]
            self._histories.append(history)
            logits[r, self._likeliest(history)] = 20.0
        return logits

    def sample(self, logits: Float32Array, batch: SampleBatch) -> Samples:
        """Greedy over the biased and masked logits; the other fields of the batch are not obeyed."""
        rows = range(len(logits)) if batch.logits_rows is None else batch.logits_rows.tolist()
        assert len(rows) == len(batch.temperature) and len(logits) == len(self._histories)
        wanted, logits = batch.logprobs, logits[rows]
        raw = logits.copy()
        for r, row in enumerate(rows):
            history = self._histories[row]
            tokens = batch.history[batch.history_offsets[r] :][: batch.num_tokens[r]]
            if not np.array_equal(tokens, history):
                raise BlockTableCorruption(f"row {r} of the logits comes from {history}, not from its tokens {tokens}")
            biased = slice(batch.bias_indptr[r], batch.bias_indptr[r + 1])
            np.add.at(logits[r], batch.bias_ids[biased], batch.bias_values[biased])
            logits[r, batch.banned_ids[batch.banned_indptr[r] : batch.banned_indptr[r + 1]]] = -np.inf
            if batch.masks is not None and r in batch.masks.rows:
                words = batch.masks.words[np.searchsorted(batch.masks.rows, r)]
                logits[r, np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocab_size] == 0] = -np.inf
        is_failed = ~(logits.max(axis=1, initial=-np.inf) > -np.inf)
        token_ids = np.argmax(logits, axis=1).astype(np.int32)
        if wanted is None:
            return Samples(token_ids, is_failed)
        scored = score_reference(raw, ScoreBatch(wanted.rows, token_ids[wanted.rows], wanted.num_top))
        return Samples(token_ids, is_failed, scored)

    def score(self, logits: Float32Array, batch: ScoreBatch) -> Logprobs:
        return score_reference(logits, batch)

    def _likeliest(self, history: npt.NDArray[np.int_] | npt.NDArray[np.int32]) -> int:
        if self._next_token is not None:
            return self._next_token(tuple(history.tolist()))
        total = int(hash_tokens(history).sum(dtype=np.uint64))
        return self._first_token_id + total % (self._vocab_size - self._first_token_id)

    def _slots(self, tables: BlockTables, row: int, kv_len: int) -> npt.NDArray[np.int64]:
        """The storage slot of each position 0..kv_len-1 of a row."""
        offset, num_blocks = int(tables.offsets[row]), -(-kv_len // self._block_size)
        block_ids = tables.block_ids[offset : offset + num_blocks]
        if len(block_ids) != num_blocks or ((block_ids < 0) | (block_ids >= self._num_kv_blocks)).any():
            raise BlockTableCorruption(f"row {row} needs {num_blocks} blocks below {self._num_kv_blocks}: {block_ids}")
        if len(np.unique(block_ids)) != num_blocks:
            raise BlockTableCorruption(f"row {row} holds a block twice: {block_ids}")
        positions = np.arange(kv_len)
        return (
            block_ids[positions // self._block_size].astype(np.int64) * self._block_size + positions % self._block_size
        )

    def _write(
        self, batch: ForwardBatch, row: int, slots: npt.NDArray[np.int64], written: npt.NDArray[np.int64]
    ) -> None:
        query = slice(batch.query_indptr[row], batch.query_indptr[row + 1])
        first = int(batch.kv_lens[row]) - len(written)
        assert first >= 0 and len(written) > 0, f"row {row} has {len(written)} tokens that end at {batch.kv_lens[row]}"
        np.testing.assert_array_equal(batch.positions[query], np.arange(first, first + len(written)))
        before = self._hashes[slots[first - 1]] if first else np.uint64(0)
        self._is_written[written] = True
        self._tokens[written] = batch.token_ids[query]
        self._positions[written] = batch.positions[query]
        self._hashes[written] = before + np.cumsum(hash_tokens(batch.token_ids[query], first), dtype=np.uint64)

    def _read(self, row: int, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The tokens of a row's history, after checking that its slots hold one unbroken sequence."""
        tokens = self._tokens[slots]
        is_right = self._is_written[slots] & (self._positions[slots] == np.arange(len(slots)))
        is_right &= self._hashes[slots] == np.cumsum(hash_tokens(tokens), dtype=np.uint64)
        if not is_right.all():
            position = int(np.argmin(is_right))
            raise BlockTableCorruption(
                f"row {row} of a step reads something else than its history at position {position} of {len(slots)} "
                f"(block {slots[position] // self._block_size}, written: {bool(self._is_written[slots[position]])})"
            )
        return tokens
