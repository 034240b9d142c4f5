"""Copying cache blocks: what is computed on a copy has the bits of what is computed on the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.forward_batches import Stretch, all_logits, forward_batch
from tests.support.random_gguf import ODD_MODEL, write_random_gguf

from ropeway import _native
from ropeway.backends.batch import Float32Array, Int32Array
from ropeway.backends.native import NativeBackend
from ropeway.backends.reference import ReferenceBackend
from ropeway.model.loading import load_model

Backend = NativeBackend | ReferenceBackend


def ids(*block_ids: int) -> Int32Array:
    return np.array(block_ids, np.int32)


@pytest.fixture(params=["reference", *_native.supported_isas()])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    model = load_model(write_random_gguf(tmp_path / "model.gguf", ODD_MODEL))
    if request.param == "reference":
        return ReferenceBackend(model.program, model.tensors, num_kv_blocks=12, block_size=8)
    return NativeBackend(model.program, model.tensors, num_kv_blocks=12, block_size=8, isa=request.param, num_threads=2)


def next_logits(backend: Backend, token_id: int, position: int, table: list[int]) -> Float32Array:
    return backend.forward(forward_batch([Stretch([token_id], position, table)])).copy()


def test_a_copy_continues_as_the_original(backend: Backend) -> None:
    tokens = np.random.default_rng(3).integers(0, backend.vocab_size, 29).tolist()
    all_logits(backend, tokens[:28], block_ids=[4, 1, 9, 2])
    backend.copy_blocks(0, ids(2, 9), ids(7, 0))
    expected = next_logits(backend, tokens[28], 28, [4, 1, 9, 2])
    np.testing.assert_array_equal(next_logits(backend, tokens[28], 28, [4, 1, 0, 7]), expected)
    # The copy is a block of its own: other tokens in it leave the original as it was.
    next_logits(backend, (tokens[27] + 1) % backend.vocab_size, 27, [4, 1, 0, 7])
    np.testing.assert_array_equal(next_logits(backend, tokens[28], 28, [4, 1, 9, 2]), expected)


def test_pairs_are_copied_in_order(backend: Backend) -> None:
    tokens = np.random.default_rng(4).integers(0, backend.vocab_size, 9).tolist()
    all_logits(backend, tokens, block_ids=[3, 5])
    expected = next_logits(backend, tokens[8], 8, [3, 5])
    backend.copy_blocks(0, ids(3, 6, 3), ids(6, 8, 3))  # a target that is a source, and a block to itself
    np.testing.assert_array_equal(next_logits(backend, tokens[8], 8, [8, 5]), expected)


def test_nothing_to_copy(backend: Backend) -> None:
    backend.copy_blocks(0, ids(), ids())


@pytest.mark.parametrize("pair", [((12,), (0,)), ((0,), (-1,)), ((0, 1), (2,))])
def test_the_native_backend_refuses_what_is_outside_the_pool(
    pair: tuple[tuple[int, ...], tuple[int, ...]], tmp_path: Path
) -> None:
    model = load_model(write_random_gguf(tmp_path / "model.gguf", ODD_MODEL))
    backend = NativeBackend(model.program, model.tensors, num_kv_blocks=12, block_size=8)
    with pytest.raises(ValueError, match="block"):
        backend.copy_blocks(0, ids(*pair[0]), ids(*pair[1]))
    with pytest.raises(ValueError, match="cache group 1 of 1"):
        backend.copy_blocks(1, ids(0), ids(1))
