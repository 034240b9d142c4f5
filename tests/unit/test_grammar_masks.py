"""Bans beside grammars: they give way where a grammar allows nothing else."""

from __future__ import annotations

import numpy as np

from ropeway.engine.grammar_masks import with_masks
from support.batches import sample_batch, token_masks

VOCAB_SIZE = 96


def test_bans_give_way_exactly_where_nothing_else_is_allowed() -> None:
    rng = np.random.default_rng(5)
    num_given_way = 0
    for _ in range(300):
        num_rows = int(rng.integers(1, 6))
        rows = np.flatnonzero(rng.random(num_rows) < 0.7)
        if not len(rows):
            continue
        allowed = [set(rng.choice(VOCAB_SIZE, rng.integers(0, 5)).tolist()) for _ in rows]
        banned = [rng.choice(VOCAB_SIZE, rng.integers(0, 4)).tolist() for _ in range(num_rows)]
        for number, row in enumerate(rows.tolist()):
            if rng.random() < 0.5:
                banned[row] = [*banned[row], *allowed[number]]
        masks = token_masks(
            {row: [i in ids for i in range(VOCAB_SIZE)] for row, ids in zip(rows.tolist(), allowed, strict=True)}
        )
        bound = with_masks(sample_batch(num_rows, banned=banned), masks)
        for row, ids in enumerate(banned):
            kept = bound.banned_ids[bound.banned_indptr[row] : bound.banned_indptr[row + 1]].tolist()
            number = rows.tolist().index(row) if row in rows else None
            gives_way = number is not None and not allowed[number] - set(ids)
            num_given_way += gives_way and bool(ids)
            assert kept == ([] if gives_way else ids)
    assert num_given_way > 50
