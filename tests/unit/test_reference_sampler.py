"""The definition of the sampler, worked by hand, and its distribution against a float64 softmax."""

from __future__ import annotations

import numpy as np
import pytest

from ropeway.backends.reference_sampler import (
    adjust_logits,
    philox4x32,
    sample_reference,
    surviving_tokens,
    token_weights,
    uniform_bits,
)
from support.batches import sample_batch

INF = np.inf


def row(*values: float) -> np.ndarray:
    return np.array([values], dtype=np.float32)


def adjusted(logits: np.ndarray, **options: object) -> list[float]:
    logits = logits.copy()
    adjust_logits(logits[0], sample_batch(1, **options), 0)  # type: ignore[arg-type]
    return logits[0].tolist()


def survivors(logits: list[float], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    ids, _ = surviving_tokens(np.array(logits, dtype=np.float32), np.float32(temperature), top_k, top_p, min_p)
    return ids.tolist()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers published with Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert philox4x32(counter, key) == words


def test_uniform_bits_differ_by_seed_index_and_position() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 0, 0)]
    assert len({uniform_bits(*key) for key in keys}) == len(keys)
    assert uniform_bits(0, 0, 0) == 0xE169C58D6627E8D5


def test_weights_never_fall_as_the_logit_rises() -> None:
    """Every step of an octave, and across its ends: an order by logit is an order by weight."""
    steps = np.arange(-(2**21) - 2000, 2001) / 2**21 * np.log(2)
    logits = np.concatenate([[20.0], 10 + steps]).astype(np.float32)
    weights = token_weights(logits, np.float32(1))
    assert weights[0] == 2**30
    assert (np.diff(weights[1:]) >= 0).all()
    assert weights[-1] > 1.99 * weights[1]


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 3.0, 100.0])
def test_weights_are_a_softmax(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(scale=6, size=20_000).astype(np.float32)
    temperature = np.float32(temperature)
    exact = 2.0**30 * np.exp((logits.astype(np.float64) - logits.max()) / np.float64(temperature))
    weights = token_weights(logits, temperature)
    assert (np.abs(weights - exact) <= 0.51 + 2e-6 * exact).all()


def test_bias_then_mask_then_penalties() -> None:
    # id 1: (2 + 2) / 2 - 0.5 * 1 - 0.25; id 2: (-1 + 3) / 2 (prompt only); id 3: -1 * 2 - 2 * 0.5 - 0.25
    got = adjusted(
        row(1, 2, -1, -1, 5),
        prompts=[[2, 2]],
        outputs=[[1, 3, 3]],
        biases=[{1: 2.0, 2: 3.0, 4: 100.0}],
        banned=[[4]],
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    assert got == [1.0, 1.25, 1.0, -3.25, -INF]


@pytest.mark.parametrize(
    ("option", "changed"),
    [
        ({"biases": [{3: -1.0}]}, {3: 2.0}),
        ({"banned": [[0, 3]]}, {0: -INF, 3: -INF}),
        ({"repetition_penalty": 2.0}, {0: 0.5, 1: -4.0, 2: 1.0}),
        ({"presence_penalty": 0.5}, {1: -2.5, 2: 1.5}),
        ({"frequency_penalty": 0.5}, {1: -3.0, 2: 1.5}),
    ],
)
def test_each_adjustment_alone(option: dict[str, object], changed: dict[int, float]) -> None:
    before = {0: 1.0, 1: -2.0, 2: 2.0, 3: 3.0}
    got = adjusted(row(*before.values()), prompts=[[0]], outputs=[[1, 2, 1]], **option)
    assert got == list({**before, **changed}.values())


def test_filters_by_hand() -> None:
    halves = [np.log(p) for p in (0.05, 0.5, 0.15, 0.2, 0.1)]
    assert survivors(halves) == [0, 1, 2, 3, 4]
    assert survivors(halves, top_k=2) == [1, 3]
    assert survivors(halves, top_k=9) == [0, 1, 2, 3, 4]
    assert survivors(halves, top_p=0.45) == [1]
    assert survivors(halves, top_p=0.6) == [1, 3]
    assert survivors(halves, top_p=0.9) == [1, 2, 3, 4]
    assert survivors(halves, min_p=0.25) == [1, 2, 3]
    assert survivors(halves, min_p=1.0) == [1]
    assert survivors(halves, top_p=1e-9) == [1]


def test_top_p_is_of_what_min_p_and_top_k_left() -> None:
    # of 0.5, 0.2, 0.15 (sum 0.85) the first two hold 0.82; of all five only 0.70
    logits = [np.log(p) for p in (0.05, 0.5, 0.15, 0.2, 0.1)]
    assert survivors(logits, top_p=0.8) == [1, 2, 3]
    assert survivors(logits, top_p=0.8, top_k=3) == [1, 3]
    assert survivors(logits, top_p=0.8, min_p=0.29) == [1, 3]


def test_filters_are_after_the_temperature() -> None:
    logits = [np.log(p) for p in (0.5, 0.3, 0.2)]
    assert survivors(logits, top_p=0.6) == [0, 1]
    assert survivors(logits, top_p=0.6, temperature=0.5) == [0]  # squares: 25, 9, 4 of 38
    assert survivors(logits, min_p=0.5) == [0, 1]
    assert survivors(logits, min_p=0.5, temperature=0.5) == [0]


def test_of_equals_the_lowest_id_comes_first() -> None:
    assert survivors([1, 2, 2, 2, 1], top_k=2) == [1, 2]
    assert survivors([1, 2, 2, 2, 1], top_k=4) == [0, 1, 2, 3]
    assert survivors([2, 2, 2, 2], top_p=0.5) == [0, 1]
    assert survivors([0.0, -0.0, 0.0], top_k=1) == [0]
    assert sample_reference(row(1, 3, 3, 0), sample_batch(1)).token_ids.tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_extreme_logits(temperature: float) -> None:
    def draw(*values: float) -> tuple[int, bool]:
        samples = sample_reference(row(*values), sample_batch(1, temperature=temperature))
        return int(samples.token_ids[0]), bool(samples.is_failed[0])

    assert draw(-INF, 0, -INF) == (1, False)
    assert draw(0, INF, 5) == (1, False)
    assert draw(-3e38, 3e38, 0) == (1, False)
    assert draw(-1e38, -3e38, -INF) == (0, False)
    for hopeless in [(-INF, -INF), (np.nan, np.nan), (1.0, np.nan), (INF, -np.nan)]:
        assert draw(*hopeless)[1]
    assert draw(7.0) == (0, False)


def test_a_failed_row_fails_alone() -> None:
    logits = np.array([[1, 2], [np.nan, 1], [3, 2]], dtype=np.float32)
    samples = sample_reference(logits, sample_batch(3))
    assert samples.is_failed.tolist() == [False, True, False]
    assert samples.token_ids[[0, 2]].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("options", "keep"),
    [({}, [0, 1, 2, 3, 4, 5]), ({"top_k": 3}, [1, 3, 5]), ({"top_p": 0.7}, [1, 3, 5]), ({"min_p": 0.4}, [1, 3, 5])],
)
def test_draws_follow_the_softmax(options: dict[str, float], keep: list[int]) -> None:
    """Chi-square over 2,000 positions of one seed; 20.5 is exceeded once in a thousand with 5 degrees of freedom."""
    logits = np.log(np.array([0.05, 0.4, 0.06, 0.25, 0.09, 0.15], dtype=np.float32))
    draws = 2000
    batch = sample_batch(draws, temperature=1.5, seed=11, position=np.arange(draws), **options)
    tokens = sample_reference(np.tile(logits, (draws, 1)), batch).token_ids
    p = np.exp(logits[keep].astype(np.float64) / 1.5)
    expected = draws * p / p.sum()
    counts = np.bincount(tokens, minlength=6)
    assert counts.sum() == counts[keep].sum()
    assert ((counts[keep] - expected) ** 2 / expected).sum() < 20.5
