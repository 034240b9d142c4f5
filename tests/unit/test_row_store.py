"""The native row store: what it gathers of a step is what numpy makes of the same sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropeway._native import RowStore, Sampler, StepRows, ThreadPool
from ropeway.backends.batch import Samples

MAX_TOKENS, MAX_BLOCKS, BLOCK_SIZE = 25, 6, 4
NEUTRAL: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "index": 0,
    "seed": 0,
}


def row_store(num_slots: int = 4, num_groups: int = 1) -> RowStore:
    store = RowStore(num_groups=num_groups, max_tokens=MAX_TOKENS, max_blocks=MAX_BLOCKS, block_size=BLOCK_SIZE)
    store.grow(num_slots)
    return store


def gather(store: RowStore, *rows: tuple[int, int, int, bool]) -> StepRows:
    """rows: (slot, start, tokens, sampled)."""
    slots, starts, num_tokens, is_sampled = (tuple(column) for column in zip(*rows, strict=True))
    return store.gather(slots, starts, num_tokens, is_sampled, None)


@dataclass
class Sequence:
    """One slot's sequence as a test keeps it."""

    prompt: list[int]
    params: dict[str, Any]
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


params = st.fixed_dictionaries(
    {
        "temperature": st.floats(0, 2, width=32),
        "top_k": st.integers(0, 2**31 - 1),
        "top_p": st.floats(0.5, 1, width=32),
        "min_p": st.floats(0, 1, width=32),
        "repetition_penalty": st.floats(0.5, 2, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "index": st.integers(0, 100),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_steps_are_gathered_as_they_stand(data: st.DataObject) -> None:
    store = row_store(num_slots=3, num_groups=2)
    sequences: dict[int, Sequence] = {}
    blocks: dict[tuple[int, int], list[int]] = {(group, slot): [] for group in range(2) for slot in range(8)}
    for slot in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)):
        sequences[slot] = Sequence(data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=12)), data.draw(params))
        store.begin(slot, sequences[slot].prompt, **sequences[slot].params)
    order = list(sequences)
    for number in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            store.grow(store.num_slots + 1)
        rows, wants = [], []
        for slot in order:
            known = len(sequences[slot].tokens)
            start = data.draw(st.integers(0, known - 1))
            is_sampled = known < MAX_TOKENS and data.draw(st.booleans())
            rows.append((slot, start, known - start, is_sampled))
            needed = -(-known // BLOCK_SIZE)
            wants.append([list(range(100 * slot + len(blocks[0, slot]), 100 * slot + needed)) for _ in range(2)])
        for group in range(2):
            granted = [want[group] for want in wants]
            indptr = np.cumsum([0, *map(len, granted)]).tolist()
            store.grant(group, order, indptr, [block + group for ids in granted for block in ids])
            for slot, ids in zip(order, granted, strict=True):
                blocks[group, slot] += [block + group for block in ids]
        step = gather(store, *rows)
        check_forward(step, rows, sequences, blocks)
        sampled = [(slot, start + count) for slot, start, count, is_sampled in rows if is_sampled]
        check_sample(step, sampled, sequences)
        token_ids = np.arange(len(sampled), dtype=np.int32) + 10 * number
        is_failed = np.array([data.draw(st.booleans()) for _ in sampled], dtype=np.bool_)
        assert store.append(step, Samples(token_ids, is_failed)) == tuple(token_ids[~is_failed].tolist())
        for (slot, _), token_id, has_failed in zip(sampled, token_ids.tolist(), is_failed.tolist(), strict=True):
            if not has_failed:
                sequences[slot].output.append(token_id)
        for slot, sequence in sequences.items():
            assert store.tokens(slot) == tuple(sequence.tokens)
            assert store.token_rows[slot, : len(sequence.tokens)].tolist() == sequence.tokens


def check_forward(
    step: StepRows,
    rows: list[tuple[int, int, int, bool]],
    sequences: dict[int, Sequence],
    blocks: dict[tuple[int, int], list[int]],
) -> None:
    ends = np.cumsum([0, *(count for _, _, count, _ in rows)])
    stretches = [(sequences[slot].tokens, start, start + count) for slot, start, count, _ in rows]
    assert step.token_ids.tolist() == [t for tokens, start, end in stretches for t in tokens[start:end]]
    assert step.positions.tolist() == [p for _, start, end in stretches for p in range(start, end)]
    assert step.query_indptr.tolist() == ends.tolist()
    assert step.kv_lens.tolist() == [end for _, _, end in stretches]
    assert step.out_rows.tolist() == [end - 1 for end, row in zip(ends[1:].tolist(), rows, strict=True) if row[3]]
    assert step.layer_slice is None
    for group, table in enumerate(step.tables):
        for offset, (slot, *_) in zip(table.offsets.tolist(), rows, strict=True):
            held = blocks[group, slot]
            assert table.block_ids[offset : offset + len(held)].tolist() == held
    for column in (step.token_ids, step.positions, step.query_indptr, step.kv_lens, step.out_rows):
        assert column.dtype == np.int32 and column.flags.c_contiguous


def check_sample(step: StepRows, sampled: list[tuple[int, int]], sequences: dict[int, Sequence]) -> None:
    for name in NEUTRAL:
        assert getattr(step, name).tolist() == [sequences[slot].params[name] for slot, _ in sampled], name
    assert step.num_tokens.tolist() == step.position.tolist() == [end for _, end in sampled]
    assert step.num_prompt_tokens.tolist() == [len(sequences[slot].prompt) for slot, _ in sampled]
    for offset, (slot, end) in zip(step.history_offsets.tolist(), sampled, strict=True):
        assert step.history[offset : offset + end].tolist() == sequences[slot].tokens[:end]
    assert step.bias_indptr.tolist() == step.banned_indptr.tolist() == [0] * (len(sampled) + 1)
    assert len(step.bias_ids) == len(step.bias_values) == len(step.banned_ids) == 0
    assert step.logits_rows is step.masks is step.logprobs is None


def test_a_gathered_step_outlives_the_growth_of_the_store_and_the_store() -> None:
    store = row_store(num_slots=1)
    store.begin(0, (5, 6, 7), **NEUTRAL)
    store.grant(0, (0,), (0, 1), (9,))
    step = gather(store, (0, 0, 3, True))
    history, (table,), token_ids = step.history, step.tables, step.token_ids
    store.grow(1000)
    del store, step
    assert history[:3].tolist() == token_ids.tolist() == [5, 6, 7]
    assert table.block_ids[table.offsets[0]] == 9


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        ([(0, 0, 4, False)], "not known"),
        ([(0, 3, 0, False)], "not known"),
        ([(0, 0, 2, True)], "too early"),
        ([(1, 0, 1, False)], "lacks blocks"),
        ([(4, 0, 1, False)], "no slot 4"),
        ([(-1, 0, 1, False)], "out of range"),
        ([(0, -1, 1, False)], "out of range"),
        ([(0, 2**40, 1, False)], "out of range"),
    ],
)
def test_a_step_that_contradicts_the_store_is_refused(rows: list[tuple[int, int, int, bool]], remedy: str) -> None:
    store = row_store()
    store.begin(0, (1, 2, 3), **NEUTRAL)
    store.begin(1, (1, 2, 3), **NEUTRAL)
    store.grant(0, (0,), (0, 2), (7, 8))
    with pytest.raises(AssertionError, match=remedy):
        gather(store, *rows)
    assert gather(store, (0, 0, 3, True)).token_ids.tolist() == [1, 2, 3]


def test_blocks_and_tokens_beyond_a_slot_are_refused() -> None:
    store = row_store()
    with pytest.raises(AssertionError, match="exceeds the context"):
        store.begin(0, (1,) * (MAX_TOKENS + 1), **NEUTRAL)
    store.begin(0, (1,) * MAX_TOKENS, **NEUTRAL)
    with pytest.raises(AssertionError, match="more blocks"):
        store.grant(0, (0,), (0, MAX_BLOCKS + 1), range(MAX_BLOCKS + 1))
    with pytest.raises(AssertionError, match="number of rows"):
        store.grant(0, (0,), (0, 1), (1, 2))
    with pytest.raises(AssertionError, match="number of rows"):
        store.grant(0, (0, 1), (0, 2, 1), (1,))
    store.begin(1, (1, 2), **NEUTRAL)
    store.grant(0, (1,), (0, 1), (3,))
    step = gather(store, (1, 0, 2, True))
    with pytest.raises(AssertionError, match="number of rows"):
        store.append(step, Samples(np.zeros(2, np.int32), np.zeros(2, np.bool_)))
    store.clear_blocks(1)
    with pytest.raises(AssertionError, match="lacks blocks"):
        gather(store, (1, 0, 2, True))


def test_native_draws_are_taken_as_they_are() -> None:
    """A row of which nothing can be drawn gets no token, and the others get theirs."""
    store = row_store()
    for slot in range(3):
        store.begin(slot, (1, 2), **NEUTRAL)
        store.grant(0, (slot,), (0, 1), (slot,))
    step = gather(store, *[(slot, 0, 2, True) for slot in range(3)])
    logits = np.array([[0, 1, 0, 0], [0, np.nan, 0, 0], [0, 0, 0, 1]], np.float32)
    drawn = Sampler(ThreadPool(1), 4).draw_rows(logits, step)
    assert drawn.token_ids[[0, 2]].tolist() == [1, 3] and drawn.is_failed.tolist() == [False, True, False]
    assert drawn.logprobs is None
    assert store.append(step, drawn) == (1, 3)
    assert [store.tokens(slot) for slot in range(3)] == [(1, 2, 1), (1, 2), (1, 2, 3)]
