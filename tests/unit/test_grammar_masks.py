"""Bans beside grammars: they give way where a grammar allows nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ropeway.backends.batch import TokenMasks
from ropeway.engine.grammar_masks import with_masks
from support.batches import sample_batch

VOCAB_SIZE = 96


def test_bans_give_way_exactly_where_nothing_else_is_allowed() -> None:
    rng = np.random.default_rng(5)
    num_given_way = 0
    for _ in range(300):
        num_rows = int(rng.integers(1, 6))
        rows = np.flatnonzero(rng.random(num_rows) < 0.7).astype(np.int32)
        allowed = [set(rng.choice(VOCAB_SIZE, rng.integers(0, 5)).tolist()) for _ in rows]
        words = np.zeros((len(rows), VOCAB_SIZE // 32), np.uint32)
        for number, ids in enumerate(allowed):
            for token_id in ids:
                words[number, token_id // 32] |= np.uint32(1 << token_id % 32)
        banned = [rng.choice(VOCAB_SIZE, rng.integers(0, 4)).tolist() for _ in range(num_rows)]
        for number, row in enumerate(rows.tolist()):
            if rng.random() < 0.5:
                banned[row] = [*banned[row], *allowed[number]]
        batch = replace(
            sample_batch(num_rows),
            banned_indptr=np.cumsum([0, *map(len, banned)]).astype(np.int32),
            banned_ids=np.array([i for ids in banned for i in ids], np.int32),
        )
        bound = with_masks(batch, TokenMasks(rows, words))
        for row, ids in enumerate(banned):
            kept = bound.banned_ids[bound.banned_indptr[row] : bound.banned_indptr[row + 1]].tolist()
            number = rows.tolist().index(row) if row in rows else None
            gives_way = number is not None and not allowed[number] - set(ids)
            num_given_way += gives_way and bool(ids)
            assert kept == ([] if gives_way else ids)
    assert num_given_way > 50
