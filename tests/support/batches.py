"""Builds a `SampleBatch` of neutral rows with some columns replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ropeway.backends.batch import LogprobRows, SampleBatch, TokenMasks


def sample_batch(
    num_rows: int,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
    biases: Sequence[Mapping[int, float]] | None = None,
    banned: Sequence[Sequence[int]] | None = None,
    allowed: Mapping[int, Sequence[bool]] | None = None,
    logprobs: LogprobRows | None = None,
    logits_rows: Sequence[int] | None = None,
    **columns: Any,
) -> SampleBatch:
    """Greedy rows without a filter, penalty, bias or mask, except for what is given: per row, or one value for all.

    position defaults to the row's number of tokens. allowed: for the rows that have a mask, whether each token may be
    drawn.
    """
    prompts = prompts or [()] * num_rows
    outputs = outputs or [()] * num_rows
    biases = biases or [{}] * num_rows
    banned = banned or [()] * num_rows
    num_prompt = np.array([len(p) for p in prompts], dtype=np.int32)
    num_tokens = num_prompt + np.array([len(o) for o in outputs], dtype=np.int32)
    neutral: dict[str, tuple[Any, Any]] = {
        "temperature": (np.float32, 0.0),
        "top_k": (np.int32, 0),
        "top_p": (np.float32, 1.0),
        "min_p": (np.float32, 0.0),
        "seed": (np.uint64, 0),
        "index": (np.int32, 0),
        "position": (np.int32, num_tokens),
        "repetition_penalty": (np.float32, 1.0),
        "presence_penalty": (np.float32, 0.0),
        "frequency_penalty": (np.float32, 0.0),
    }
    assert columns.keys() <= neutral.keys(), columns.keys() - neutral.keys()
    return SampleBatch(
        **{
            name: np.broadcast_to(np.asarray(columns.get(name, value)).astype(dtype), (num_rows,)).copy()
            for name, (dtype, value) in neutral.items()
        },
        history=np.array([t for p, o in zip(prompts, outputs, strict=True) for t in (*p, *o)], dtype=np.int32),
        history_offsets=(np.cumsum(num_tokens) - num_tokens).astype(np.int64),
        num_prompt_tokens=num_prompt,
        num_tokens=num_tokens,
        bias_indptr=np.cumsum([0, *(len(b) for b in biases)]).astype(np.int32),
        bias_ids=np.array([t for b in biases for t in b], dtype=np.int32),
        bias_values=np.array([v for b in biases for v in b.values()], dtype=np.float32),
        banned_indptr=np.cumsum([0, *(len(b) for b in banned)]).astype(np.int32),
        banned_ids=np.array([t for b in banned for t in b], dtype=np.int32),
        logits_rows=None if logits_rows is None else np.array(logits_rows, dtype=np.int32),
        masks=None if allowed is None else token_masks(allowed),
        logprobs=logprobs,
    )


def token_masks(allowed: Mapping[int, Sequence[bool]]) -> TokenMasks:
    """The masks of rows, given by row as one truth value per token."""
    words = []
    for row in sorted(allowed):
        bits = np.zeros(-(-len(allowed[row]) // 32) * 32, dtype=np.bool_)
        bits[: len(allowed[row])] = allowed[row]
        words.append(np.packbits(bits, bitorder="little").view(np.uint32))
    return TokenMasks(np.array(sorted(allowed), dtype=np.int32), np.array(words))
