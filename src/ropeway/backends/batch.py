"""The inputs of a step as arrays, and the protocol of a backend. Knows no scheduling, no text.

Shapes use T tokens in the step, S sequences (rows of the plan), R rows whose logits are wanted, V vocabulary.
Everything is ragged and flat; there is no padding in the interface. Indices are int32, offsets into storage int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ropeway._native import StepDraws, StepRows

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockTables:
    """Where each sequence's cache blocks are, for one cache group.

    Row s's table starts at block_ids[offsets[s]] and holds ceil(kv_lens[s] / block_size) ids. The storage belongs to
    the runner and lives across steps, so a step does not copy tables; offsets replace a CSR indptr for that reason.
    """

    block_ids: Int32Array
    offsets: Int64Array  # [S]


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """Part `index` of `count` of a model's layers; the parts are as equal as can be, and follow one another."""

    index: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def bounds(self, num_layers: int) -> tuple[int, int]:
        """The first layer of the slice, and the one behind its last, of num_layers >= count."""
        return self.index * num_layers // self.count, (self.index + 1) * num_layers // self.count


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's forward pass.

    token_ids[T], positions[T]; row s owns tokens query_indptr[s]:query_indptr[s+1], at consecutive positions that end
    at kv_lens[s] - 1. kv_lens[S]: keys the row's last token sees, itself included. tables: one per cache group.
    out_rows[R]: ascending indices into T whose logits are wanted: of rows that sample, and of prompt tokens whose
    successors are to be scored.

    layer_slice: where it is given, the last row passes only these layers in this step. Its other slices come, in order,
    in other steps with the same tokens; none of its logits is wanted before the last. A slice 0 drops what another
    sliced row has left.
    """

    token_ids: Int32Array
    positions: Int32Array
    query_indptr: Int32Array
    kv_lens: Int32Array
    tables: tuple[BlockTables, ...]
    out_rows: Int32Array
    layer_slice: LayerSlice | None = None


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may be drawn, for the few rows of a SampleBatch that are bound to a grammar.

    rows[M] int32 ascending, of the batch. words[M, ceil(V / 32)] uint32: a bit per token, low bits first; 1 allows it.
    """

    rows: Int32Array
    words: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows of a SampleBatch whose drawn token's log-probability is wanted, with the num_top likeliest tokens.

    rows[L] int32 ascending, of the batch.
    """

    rows: Int32Array
    num_top: int


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """Tokens that are known, to be scored by rows of logits: token_ids[L] int32 by rows[L] int32, ascending."""

    rows: Int32Array
    token_ids: Int32Array
    num_top: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities of raw logits: before biases, masks, penalties and temperature.

    logprobs[L] float32 and ranks[L] int32 (1 is the likeliest) of the tokens asked for; top_ids[L, K] int32 and
    top_logprobs[L, K] float32: the K likeliest, likeliest first, of equals the lowest id. K is num_top, or V where that
    is less. NaN where the logits hold one.
    """

    logprobs: Float32Array
    ranks: Int32Array
    top_ids: Int32Array
    top_logprobs: Float32Array


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """How to draw one token from each of R rows of logits; docs/architecture.md has the order of operations.

    temperature[R] float32 (0 = greedy), top_k[R] int32 (0 = all), top_p[R], min_p[R] float32.
    seed[R] uint64, index[R] int32 (of the sequence in its request), position[R] int32 (of the token being drawn):
    the key and counter of the generator.
    repetition_penalty[R], presence_penalty[R], frequency_penalty[R] float32.
    history: token storage of the runner; row r's prompt is history[history_offsets[r]:][:num_prompt_tokens[r]],
    followed by its output, num_tokens[r] in all. Read only for rows with a penalty.
    bias_indptr[R+1] int32, bias_ids, bias_values: additions to logits. banned_indptr[R+1], banned_ids: masked out.
    logits_rows[R] int32 ascending: the row of logits that each row reads; None: its own number.
    masks, logprobs: for the rows that have a grammar or ask for log-probabilities; None: there are none.
    """

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    seed: npt.NDArray[np.uint64]
    index: Int32Array
    position: Int32Array
    repetition_penalty: Float32Array
    presence_penalty: Float32Array
    frequency_penalty: Float32Array
    history: Int32Array
    history_offsets: Int64Array
    num_prompt_tokens: Int32Array
    num_tokens: Int32Array
    bias_indptr: Int32Array
    bias_ids: Int32Array
    bias_values: Float32Array
    banned_indptr: Int32Array
    banned_ids: Int32Array
    logits_rows: Int32Array | None = None
    masks: TokenMasks | None = None
    logprobs: LogprobRows | None = None


class Samples(NamedTuple):
    """What was drawn: token_ids[R] int32, is_failed[R] bool, and the Logprobs that the batch asked for.

    A row fails, and its token id means nothing, if its logits hold a NaN or leave no token to draw (all are -inf).
    """

    token_ids: Int32Array
    is_failed: npt.NDArray[np.bool_]
    logprobs: Logprobs | None = None


# What a runner gathers of its storage has the fields of both; the native backend takes it as it lies.
ForwardRows: TypeAlias = ForwardBatch | StepRows
SampleRows: TypeAlias = SampleBatch | StepRows
Draws: TypeAlias = Samples | StepDraws


class Backend(Protocol):
    """A Program made executable, with its KV pool. Not thread-safe: one caller at a time.

    num_layers: the most slices that a row can pass the model in.
    `copy_blocks` copies whole blocks of a cache group, in every layer and pair after pair: an earlier target may be a
    source.
    `forward` returns logits[R, V] float32 that stay valid until the next `forward`; `sample` may change in place
    the rows that it reads; `score` changes no row. The arrays of a batch are the caller's again when a call returns.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_kv_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    def copy_blocks(self, group: int, source_ids: Int32Array, destination_ids: Int32Array) -> None: ...

    def forward(self, batch: ForwardRows) -> Float32Array: ...

    def sample(self, logits: Float32Array, batch: SampleRows) -> Draws: ...

    def score(self, logits: Float32Array, batch: ScoreBatch) -> Logprobs: ...
