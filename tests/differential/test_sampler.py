"""The native sampler against its definition: the same survivors and the same token, whatever the row, thread or set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ropeway import _native
from ropeway.backends.batch import Float32Array, LogprobRows, Logprobs, SampleBatch, ScoreBatch
from ropeway.backends.reference_sampler import adjust_logits, sample_reference, score_reference, surviving_tokens
from support.batches import sample_batch

ISAS = _native.supported_isas()
INF = np.inf


def native(logits: Float32Array, batch: SampleBatch, isa: str, num_threads: int = 1) -> tuple[np.ndarray, ...]:
    sampler = _native.Sampler(_native.ThreadPool(num_threads), logits.shape[1], isa)
    return drawn(sampler, logits, batch)[:3]


def drawn(sampler: _native.Sampler, logits: Float32Array, batch: SampleBatch) -> tuple[Any, ...]:
    """token_ids, is_failed, total_weights, and the columns of Logprobs or None."""
    return sampler.draw(logits, batch)


def total_weight(logits: Float32Array, batch: SampleBatch, r: int) -> int:
    """The sum of the survivors' weights of one row, by the definition: a checksum of the survivors."""
    logits = logits.copy()
    adjust_logits(logits, batch, r)
    if batch.temperature[r] == 0 or np.isnan(logits).any() or logits.max() == -INF:
        return 0
    logits = np.minimum(logits, np.finfo(np.float32).max)
    filters = int(batch.top_k[r]), float(batch.top_p[r]), float(batch.min_p[r])
    return int(surviving_tokens(logits, batch.temperature[r], *filters)[1].sum())


def assert_equal_to_reference(logits: Float32Array, batch: SampleBatch, isa: str) -> None:
    token_ids, is_failed, total_weights = native(logits.copy(), batch, isa)
    expected = sample_reference(logits.copy(), batch)
    np.testing.assert_array_equal(is_failed, expected.is_failed)
    np.testing.assert_array_equal(token_ids, expected.token_ids)
    np.testing.assert_array_equal(total_weights, [total_weight(logits[r], batch, r) for r in range(len(logits))])


def random_rows(
    rng: np.random.Generator, num_rows: int, vocab_size: int, draw: Callable[..., np.ndarray]
) -> tuple[Float32Array, SampleBatch]:
    """Rows with every field at play, each neutral about half of the time."""

    def some(values: Any, neutral: float) -> np.ndarray:
        return np.where(rng.random(num_rows) < 0.5, neutral, rng.choice(values, num_rows))

    def ids(most: int) -> list[int]:
        return rng.integers(0, vocab_size, rng.integers(0, most + 1)).tolist()

    batch = sample_batch(
        num_rows,
        prompts=[ids(20) for _ in range(num_rows)],
        outputs=[ids(20) for _ in range(num_rows)],
        biases=[{t: float(rng.normal(scale=3)) for t in ids(3)} for _ in range(num_rows)],
        banned=[ids(3) for _ in range(num_rows)],
        temperature=rng.choice([0.0, 1e-3, 0.3, 0.7, 1.0, 2.0, 50.0], num_rows),
        top_k=some([1, 2, 5, 40, 64, 65, 100, 900, vocab_size - 1, vocab_size, vocab_size + 7], 0),
        top_p=some([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999], 1.0),
        min_p=some([1e-9, 0.01, 0.1, 0.5, 1.0], 0.0),
        seed=rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        index=rng.integers(0, 5, num_rows),
        position=rng.integers(0, 2**31 - 1, num_rows),
        repetition_penalty=some([0.5, 1.3, 2.0], 1.0),
        presence_penalty=some([-1.5, 0.7], 0.0),
        frequency_penalty=some([-0.4, 0.3], 0.0),
    )
    return draw(size=(num_rows, vocab_size)).astype(np.float32), batch


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 63, 64, 65, 127, 1003, 4097])
@pytest.mark.parametrize("kind", ["normal", "peaked", "flat", "equal", "few_values", "masked"])
def test_equal_to_the_definition(isa: str, vocab_size: int, kind: str) -> None:
    rng = np.random.default_rng([vocab_size, len(kind)])
    draws: dict[str, Callable[..., np.ndarray]] = {
        "normal": lambda size: rng.normal(scale=3, size=size),
        "peaked": lambda size: rng.normal(scale=0.5, size=size) + 12 * (rng.random(size) < 0.01),
        "flat": lambda size: rng.normal(scale=1e-3, size=size),
        "equal": lambda size: np.full(size, 1.25),
        "few_values": lambda size: rng.integers(-2, 3, size=size),
        "masked": lambda size: np.where(rng.random(size) < 0.9, -INF, rng.normal(scale=2, size=size)),
    }
    assert_equal_to_reference(*random_rows(rng, 48, vocab_size, draws[kind]), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_equal_to_the_definition_on_a_large_vocabulary(isa: str) -> None:
    rng = np.random.default_rng(3)
    assert_equal_to_reference(*random_rows(rng, 24, 49_152, lambda size: rng.normal(scale=3, size=size)), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_equal_to_the_definition_on_any_bits(isa: str) -> None:
    """Random float bits: infinities, NaNs, denormals, signed zeros and the largest floats."""
    rng = np.random.default_rng(4)
    special = np.array([0.0, -0.0, INF, -INF, 3.4e38, -3.4e38, 1e-45, -1e-45, 1e38, 1.0], dtype=np.float32)
    with_bits = rng.integers(0, 2**32, size=(64, 130), dtype=np.uint32).view(np.float32)
    with_bits[:32][np.isnan(with_bits[:32])] = 0
    for logits in (with_bits, rng.choice(special, size=(200, 9)), rng.choice([-INF, np.nan, 1.0], size=(40, 3))):
        _, batch = random_rows(rng, len(logits), logits.shape[1], rng.normal)
        assert_equal_to_reference(logits.astype(np.float32), batch, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_does_not_depend_on_its_batch_mates(isa: str, num_threads: int) -> None:
    rng = np.random.default_rng(5)
    logits, batch = random_rows(rng, 40, 777, lambda size: rng.normal(scale=2, size=size))
    together = native(logits.copy(), batch, isa, num_threads)
    for r in range(40):
        alone = native(logits[r : r + 1].copy(), only_row(batch, r), isa, num_threads)
        assert [column[0] for column in alone] == [column[r] for column in together]


def only_row(batch: SampleBatch, r: int) -> SampleBatch:
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if value is None:
            continue
        is_column = field.name not in ("history", "bias_ids", "bias_values", "banned_ids")
        columns[field.name] = value[r : r + 1] if is_column and not field.name.endswith("indptr") else value
    biased, banned = (slice(p[r], p[r + 1]) for p in (batch.bias_indptr, batch.banned_indptr))
    columns["bias_ids"], columns["bias_values"] = batch.bias_ids[biased], batch.bias_values[biased]
    columns["banned_ids"] = batch.banned_ids[banned]
    columns["bias_indptr"] = np.array([0, biased.stop - biased.start], dtype=np.int32)
    columns["banned_indptr"] = np.array([0, banned.stop - banned.start], dtype=np.int32)
    return SampleBatch(**columns)


@pytest.mark.parametrize("isa", ISAS)
def test_the_sampler_keeps_nothing_between_rows(isa: str) -> None:
    """Penalty counts of one call are gone in the next, also after a row that failed."""
    rng = np.random.default_rng(6)
    sampler = _native.Sampler(_native.ThreadPool(1), 100, isa)
    for _ in range(20):
        logits, batch = random_rows(rng, 6, 100, lambda size: rng.normal(scale=1, size=size))
        logits[rng.integers(0, 6)] = np.nan
        expected = sample_reference(logits.copy(), batch)
        token_ids, is_failed, _, _ = drawn(sampler, logits, batch)
        np.testing.assert_array_equal(token_ids, expected.token_ids)
        np.testing.assert_array_equal(is_failed, expected.is_failed)


CHANGES: dict[str, Any] = {
    "temperature": 0.2,
    "top_k": 2,
    "top_p": 0.3,
    "min_p": 0.6,
    "seed": 99,
    "index": 1,
    "position": np.arange(400) + 1000,
    "repetition_penalty": 3.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "biases": [{4: 3.0}] * 400,
    "banned": [[5]] * 400,
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("field", CHANGES)
def test_every_field_has_an_effect(isa: str, field: str) -> None:
    logits = np.tile(np.array([0.5, 1.0, 0.2, 0.8, 0.1, 0.9], dtype=np.float32), (400, 1))
    histories = {"prompts": [[0, 3]] * 400, "outputs": [[1, 1]] * 400}
    columns: dict[str, Any] = {"temperature": 1.0, "position": np.arange(400), **histories}
    before, _, _ = native(logits.copy(), sample_batch(400, **columns), isa)
    after, _, _ = native(logits.copy(), sample_batch(400, **{**columns, field: CHANGES[field]}), isa)
    assert (before != after).mean() > 0.02


@pytest.mark.parametrize("isa", ISAS)
def test_draws_follow_the_softmax(isa: str) -> None:
    """Chi-square, 100,000 draws over 50 tokens; 85.4 is exceeded once in a thousand with 49 degrees of freedom."""
    rng = np.random.default_rng(8)
    logits = rng.normal(size=50).astype(np.float32)
    draws = 100_000
    batch = sample_batch(draws, temperature=0.8, seed=5, position=np.arange(draws))
    token_ids, _, _ = native(np.tile(logits, (draws, 1)), batch, isa)
    p = np.exp(logits.astype(np.float64) / np.float64(np.float32(0.8)))
    expected = draws * p / p.sum()
    assert ((np.bincount(token_ids, minlength=50) - expected) ** 2 / expected).sum() < 85.4


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bias_ids", np.array([9], dtype=np.int32), "bias_ids holds token 9 of a vocabulary of 9"),
        ("banned_ids", np.array([-1], dtype=np.int32), "banned_ids holds token -1"),
        ("history", np.array([1, 9], dtype=np.int32), "history holds token 9"),
        ("history_offsets", np.array([1], dtype=np.int64), "history outside the storage"),
        ("num_prompt_tokens", np.array([3], dtype=np.int32), "history outside the storage"),
        ("bias_indptr", np.array([0, 2], dtype=np.int32), "bias_indptr does not ascend from 0 to 1"),
        ("banned_indptr", np.array([1, 1], dtype=np.int32), "banned_indptr does not ascend from 0 to 1"),
        ("top_k", np.array([1, 2], dtype=np.int32), "top_k has 2 entries, not 1"),
        ("top_p", np.array([1.0]), "top_p has the wrong type"),
        ("temperature", np.array([np.nan], dtype=np.float32), "row 0 has a parameter out of range"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(name: str, value: np.ndarray, message: str) -> None:
    batch = sample_batch(1, outputs=[[1, 2]], biases=[{3: 1.0}], banned=[[4]], presence_penalty=1.0)
    sampler = _native.Sampler(_native.ThreadPool(1), 9)
    with pytest.raises(ValueError, match=message):
        drawn(sampler, np.zeros((1, 9), dtype=np.float32), dataclasses.replace(batch, **{name: value}))


def test_sizes_that_make_no_sense_are_refused() -> None:
    pool = _native.ThreadPool(1)
    for vocab_size in (0, -1, 2**22 + 1):
        with pytest.raises(ValueError, match="cannot be sampled"):
            _native.Sampler(pool, vocab_size)
    with pytest.raises(ValueError, match="logits of 8 tokens, not 9"):
        drawn(_native.Sampler(pool, 9), np.zeros((1, 8), dtype=np.float32), sample_batch(1))


def test_an_empty_batch_draws_nothing() -> None:
    sampler = _native.Sampler(_native.ThreadPool(2), 9)
    *columns, logprobs = drawn(sampler, np.zeros((0, 9), dtype=np.float32), sample_batch(0))
    assert logprobs is None
    assert [len(column) for column in columns] == [0, 0, 0]
    assert [column.dtype for column in columns] == [np.int32, np.bool_, np.uint64]


def assert_same_logprobs(found: Logprobs, expected: Logprobs) -> None:
    np.testing.assert_array_equal(found.ranks, expected.ranks)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-6, atol=3e-6)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 63, 64, 65, 127, 1003, 49_152])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_scores_of_known_tokens(isa: str, vocab_size: int, num_top: int) -> None:
    rng = np.random.default_rng([vocab_size, num_top])
    logits = np.concatenate(
        [
            rng.normal(scale=4, size=(3, vocab_size)),
            rng.integers(-2, 3, size=(3, vocab_size)),  # ties, which go to the lowest id
            np.where(np.arange(vocab_size) % 3 == 0, rng.normal(size=(2, vocab_size)), -INF),
        ]
    ).astype(np.float32)
    rows = np.array([0, 1, 3, 4, 6, 7], dtype=np.int32)
    batch = ScoreBatch(rows, (rng.integers(0, -(-vocab_size // 3), len(rows)) * 3).astype(np.int32), num_top)
    before = logits.copy()
    sampler = _native.Sampler(_native.ThreadPool(2), vocab_size, isa)
    assert_same_logprobs(Logprobs(*sampler.score(logits, batch)), score_reference(logits, batch))
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_with_a_nan_scores_nan(isa: str) -> None:
    logits = np.array([[1, np.nan, 2]], dtype=np.float32)
    sampler = _native.Sampler(_native.ThreadPool(1), 3, isa)
    scores = Logprobs(*sampler.score(logits, ScoreBatch(np.zeros(1, np.int32), np.zeros(1, np.int32), 2)))
    assert np.isnan(scores.logprobs).all() and np.isnan(scores.top_logprobs).all()


@pytest.mark.parametrize("isa", ISAS)
def test_log_probabilities_are_of_the_raw_logits(isa: str) -> None:
    """Of the rows that ask, before biases, masks and penalties; the draws are as without asking."""
    rng = np.random.default_rng(6)
    logits, batch = random_rows(rng, 40, 777, lambda size: rng.normal(scale=2, size=size))
    plain = native(logits.copy(), batch, isa, 2)
    rows = np.arange(0, 40, 3, dtype=np.int32)
    asking = dataclasses.replace(batch, logprobs=LogprobRows(rows, 6))
    sampler = _native.Sampler(_native.ThreadPool(2), 777, isa)
    *draws, found = drawn(sampler, logits.copy(), asking)
    for column, same in zip(draws, plain, strict=True):
        np.testing.assert_array_equal(column, same)
    assert_same_logprobs(Logprobs(*found), score_reference(logits, ScoreBatch(rows, plain[0][rows], 6)))
    expected = sample_reference(logits.copy(), asking).logprobs
    assert expected is not None
    assert_same_logprobs(Logprobs(*found), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab_size", [5, 32, 33, 777])
def test_masks_and_chosen_rows_of_logits(isa: str, vocab_size: int) -> None:
    """Only allowed tokens are drawn; the batch may read some rows of the logits and leave the others as they are."""
    rng = np.random.default_rng(vocab_size)
    logits, batch = random_rows(rng, 12, vocab_size, lambda size: rng.normal(scale=2, size=size))
    allowed = {row: rng.random(vocab_size) < 0.2 for row in (1, 2, 7, 11)}
    allowed[2][:] = False
    batch = dataclasses.replace(
        batch,
        masks=sample_batch(12, allowed=allowed).masks,
        logits_rows=np.array([0, 1, 3, 4, 6, 7, 8, 9, 11, 12, 13, 15], dtype=np.int32),
    )
    wide = rng.normal(size=(16, vocab_size)).astype(np.float32)
    wide[batch.logits_rows] = logits
    changed = wide.copy()
    token_ids, is_failed, _ = native(changed, batch, isa)
    expected = sample_reference(wide.copy(), batch)
    np.testing.assert_array_equal(token_ids, expected.token_ids)
    np.testing.assert_array_equal(is_failed, expected.is_failed)
    assert is_failed[2]
    assert all(allowed[row][token_ids[row]] for row in allowed if not is_failed[row])
    np.testing.assert_array_equal(changed[[2, 5, 10, 14]], wide[[2, 5, 10, 14]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab_size", [33, 64, 65, 97, 4096, 4097])
def test_what_a_mask_leaves_out_is_not_read(isa: str, vocab_size: int) -> None:
    """Whole chunks are left out by the masks of grammars: draws and weights are as if all of the row had been read."""
    rng = np.random.default_rng(vocab_size)
    logits, batch = random_rows(rng, 48, vocab_size, lambda size: rng.normal(scale=2, size=size))
    allowed = {}
    for row, num_allowed in enumerate([1, 2, 5, 20, vocab_size - 1, vocab_size] * 8):
        allowed[row] = np.zeros(vocab_size, np.bool_)
        allowed[row][rng.choice(vocab_size, min(num_allowed, vocab_size), replace=False)] = True
        if row % 3 == 0:
            allowed[row] = np.sort(allowed[row])[:: 1 if row % 2 else -1]  # one run, at the end or at the beginning
        logits[row][~allowed[row]] = (1e30, np.nan, INF)[row % 3]
    batch = dataclasses.replace(batch, masks=sample_batch(48, allowed=allowed).masks)
    assert_equal_to_reference(logits, batch, isa)


def test_refuses_rows_that_are_not_there() -> None:
    sampler = _native.Sampler(_native.ThreadPool(1), 8)
    logits, three = np.zeros((3, 8), np.float32), np.zeros(3, np.int32)
    for rows in ([0, 3], [1, 1], [2, 0], [-1]):
        with pytest.raises(ValueError, match="do not ascend within 3 rows"):
            sampler.score(logits, ScoreBatch(np.array(rows, np.int32), three[: len(rows)], 1))
        with pytest.raises(ValueError, match="logits_rows do not ascend"):
            drawn(sampler, logits, sample_batch(len(rows), logits_rows=rows))
        with pytest.raises(ValueError, match="logprobs.rows do not ascend"):
            drawn(sampler, logits, sample_batch(3, logprobs=LogprobRows(np.array(rows, np.int32), 1)))
    with pytest.raises(ValueError, match="token_ids holds token 8"):
        sampler.score(logits, ScoreBatch(three[:1], np.array([8], np.int32), 1))
    with pytest.raises(ValueError, match="masks.words"):
        drawn(sampler, logits, sample_batch(3, allowed={0: [True] * 40}))
