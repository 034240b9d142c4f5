"""Scheduling invariance: a row's logits have the same bits whatever is computed beside it, and in whatever pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.forward_batches import Stretch, all_logits, forward_batch
from tests.support.random_gguf import ODD_MODEL, RandomModel, write_random_gguf

from ropeway import _native
from ropeway.backends.batch import Float32Array
from ropeway.backends.native import NativeBackend
from ropeway.model.loading import Model, load_model
from ropeway.model.weights import TensorType

MODELS = {
    "odd": ODD_MODEL,
    "q8_0": RandomModel(weight_type=TensorType.Q8_0, num_heads=6, vocab_size=331),
    "q4_1": RandomModel(weight_type=TensorType.Q4_1, num_heads=4, num_kv_heads=1, head_type=TensorType.Q8_0),
}
NUM_TOKENS = 600  # more than one split of the key axis, more than one pass of 512 tokens
NUM_BLOCKS = 400


@pytest.fixture(
    scope="module", params=[(name, isa) for name in MODELS for isa in _native.supported_isas()], ids="-".join
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, str]:
    name, isa = request.param
    path = tmp_path_factory.mktemp(name) / "model.gguf"
    shape = replace(MODELS[name], num_layers=1) if isa == "scalar" else MODELS[name]  # some 50 times slower
    return load_model(write_random_gguf(path, shape)), isa


def native(model: Model, *, isa: str | None = None, num_threads: int = 2) -> NativeBackend:
    return NativeBackend(model.program, model.tensors, num_kv_blocks=NUM_BLOCKS, num_threads=num_threads, isa=isa)


@pytest.fixture(scope="module")
def tokens(case: tuple[Model, str]) -> list[int]:
    return np.random.default_rng(3).integers(0, case[0].program.vocab_size, NUM_TOKENS).tolist()


@pytest.fixture(scope="module")
def whole(case: tuple[Model, str], tokens: list[int]) -> Float32Array:
    model, isa = case
    return all_logits(native(model, isa=isa, num_threads=1), tokens)


def assert_same_bits(logits: Float32Array, expected: Float32Array) -> None:
    np.testing.assert_array_equal(logits.view(np.int32), expected.view(np.int32))


def test_threads(case: tuple[Model, str], tokens: list[int], whole: Float32Array) -> None:
    model, isa = case
    for num_threads in (2, 3):
        assert_same_bits(all_logits(native(model, isa=isa, num_threads=num_threads), tokens), whole)


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 64, 512])
def test_chunks(case: tuple[Model, str], tokens: list[int], whole: Float32Array, chunk_size: int) -> None:
    model, isa = case
    num_tokens = NUM_TOKENS if chunk_size > 3 and isa != "scalar" else 200
    logits = all_logits(native(model, isa=isa), tokens[:num_tokens], chunk_size=chunk_size)
    assert_same_bits(logits, whole[:num_tokens])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_one_token_with_a_long_past(
    case: tuple[Model, str], tokens: list[int], whole: Float32Array, num_threads: int
) -> None:
    """Its splits of the key axis are shared between threads, if there are several, alone and among short mates."""
    model, isa = case
    backend = native(model, isa=isa, num_threads=num_threads)
    table = list(range(40))
    backend.forward(forward_batch([Stretch(tokens[:-1], 0, table)], last_rows_only=True))
    last = Stretch(tokens[-1:], NUM_TOKENS - 1, table)
    assert_same_bits(backend.forward(forward_batch([last])), whole[-1:])
    short = [Stretch([7], 0, [40 + i]) for i in range(20)]
    assert_same_bits(backend.forward(forward_batch([*short, last]))[-1:], whole[-1:])


@pytest.mark.parametrize("num_sequences", [2, 5, 16, 64])
def test_batches(case: tuple[Model, str], tokens: list[int], whole: Float32Array, num_sequences: int) -> None:
    """Prompts of many lengths and tokens with pasts of many lengths in one step, over blocks in no order."""
    model, isa = case
    rng = np.random.default_rng(num_sequences)
    backend = native(model, isa=isa)
    blocks = rng.permutation(NUM_BLOCKS).tolist()
    cuts = [sorted(rng.integers(1, 90, 2).tolist()) for _ in range(num_sequences)]
    tables = [[blocks.pop() for _ in range(-(-end // 16))] for _, end in cuts]
    first = [Stretch(tokens[:start], 0, table) for (start, _), table in zip(cuts, tables, strict=True)]
    assert_same_bits(backend.forward(forward_batch(first)), _rows(whole, [(0, start) for start, _ in cuts]))
    # Then some sequences go on by a chunk and the others by one token, in another order.
    order = rng.permutation(num_sequences).tolist()
    ends = [end if i % 2 else min(start + 1, end) for i, (start, end) in enumerate(cuts)]
    second = [Stretch(tokens[cuts[i][0] : ends[i]], cuts[i][0], tables[i]) for i in order if ends[i] > cuts[i][0]]
    spans = [(cuts[i][0], ends[i]) for i in order if ends[i] > cuts[i][0]]
    assert_same_bits(backend.forward(forward_batch(second)), _rows(whole, spans))


def test_what_a_block_held_before(case: tuple[Model, str], tokens: list[int], whole: Float32Array) -> None:
    model, isa = case
    backend = native(model, isa=isa)
    table = list(range(13))
    backend.forward(forward_batch([Stretch(tokens[::-1][:200], 0, table)], last_rows_only=True))
    assert_same_bits(all_logits(backend, tokens[:200], chunk_size=100, block_ids=table), whole[:200])


def _rows(whole: Float32Array, spans: Sequence[tuple[int, int]]) -> Float32Array:
    return np.concatenate([whole[start:end] for start, end in spans])


@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim"), [(1, 3, 32), (2, 1, 256), (5, 2, 64), (7, 1, 80), (8, 2, 128), (17, 1, 8)]
)
def test_query_heads_per_kv_head(tmp_path: Path, group: int, num_kv_heads: int, head_dim: int) -> None:
    """Rows that share registers, a row alone, and rows on both sides of the end of a tile of keys."""
    shape = RandomModel(
        num_layers=1, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, vocab_size=50
    )
    model = load_model(write_random_gguf(tmp_path / "model.gguf", shape))
    tokens = np.random.default_rng(group).integers(0, 50, 150).tolist()
    whole = all_logits(native(model, num_threads=1), tokens)
    for chunk_size in (1, 2, 7, 61):
        assert_same_bits(all_logits(native(model), tokens, chunk_size=chunk_size), whole)
    for isa in _native.supported_isas():
        length = 70 if isa == "scalar" else 150
        assert_same_bits(all_logits(native(model, isa=isa), tokens[:length]), whole[:length])
        blocks_of_8 = NativeBackend(
            model.program, model.tensors, block_size=8, num_kv_blocks=length // 8 + 1, num_threads=1, isa=isa
        )
        assert_same_bits(all_logits(blocks_of_8, tokens[:length], chunk_size=61), whole[:length])


def test_default_model(model_path: Path) -> None:
    model = load_model(model_path)
    tokens = np.random.default_rng(5).integers(0, model.program.vocab_size, 70).tolist()
    alone = native(model, num_threads=1)
    table = list(range(5))
    alone.forward(forward_batch([Stretch(tokens[:-1], 0, table)], last_rows_only=True))
    expected = alone.forward(forward_batch([Stretch(tokens[-1:], 69, table)]))
    backend = native(model)
    for start in range(0, 69, 23):
        backend.forward(forward_batch([Stretch(tokens[start : start + 23], start, table)], last_rows_only=True))
    mates = [Stretch(tokens[: 1 + i], 0, [5 + i]) for i in range(15)]
    logits = backend.forward(forward_batch([*mates, Stretch(tokens[-1:], 69, table)], last_rows_only=True))
    assert_same_bits(logits[-1:], expected)
    for isa in _native.supported_isas():
        if isa == "scalar":  # minutes
            continue
        logits = native(model, isa=isa).forward(forward_batch([Stretch(tokens, 0, table)], last_rows_only=True))
        assert_same_bits(logits, expected)
