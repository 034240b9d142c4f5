"""Steps that fill the native buffers exactly, steps of every number of rows, steps of every mixture: the same bits.

`make sanitize` runs these with every read and write watched.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.forward_batches import Stretch, all_logits, forward_batch
from tests.support.random_gguf import ODD_MODEL, RandomModel, write_random_gguf

from ropeway.backends.batch import Float32Array
from ropeway.backends.native import NativeBackend
from ropeway.model.loading import Model, load_model
from ropeway.model.weights import TensorType

MODELS = {
    # Outputs that fill no tile of columns, heads that fill no vector.
    "odd": replace(ODD_MODEL, num_layers=1, context_length=2048),
    "q4_0": RandomModel(
        weight_type=TensorType.Q4_0, num_layers=1, num_heads=5, num_kv_heads=1, head_dim=32, vocab_size=37
    ),
    "q4_1": RandomModel(weight_type=TensorType.Q4_1, num_layers=1, head_type=TensorType.Q8_0, context_length=2048),
    "q8_0": RandomModel(weight_type=TensorType.Q8_0, num_layers=1, vocab_size=331),
}
NUM_TOKENS = 1100  # three splits of the key axis, three passes of 512 rows at most


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    return load_model(write_random_gguf(path, replace(MODELS[request.param], context_length=2048)))


@pytest.fixture(scope="module")
def tokens(model: Model) -> list[int]:
    return np.random.default_rng(11).integers(0, model.program.vocab_size, NUM_TOKENS).tolist()


@pytest.fixture(scope="module")
def whole(model: Model, tokens: list[int]) -> Float32Array:
    return all_logits(native(model, num_threads=1), tokens)


def native(model: Model, *, num_threads: int, block_size: int = 16, num_kv_blocks: int = 300) -> NativeBackend:
    return NativeBackend(
        model.program, model.tensors, num_threads=num_threads, block_size=block_size, num_kv_blocks=num_kv_blocks
    )


def assert_same_bits(logits: Float32Array, expected: Float32Array) -> None:
    np.testing.assert_array_equal(logits.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_passes_that_fill_their_buffers(model: Model, tokens: list[int], whole: Float32Array, num_threads: int) -> None:
    """Buffers hold powers of two rows and grow between passes; blocks and the pool end with the last token too."""
    backend = native(model, num_threads=num_threads, num_kv_blocks=64)
    for num_rows in (8, 16, 32, 64, 128, 256, 512, 1024, 1, 32):
        table = list(range(-(-num_rows // 16)))
        assert_same_bits(backend.forward(forward_batch([Stretch(tokens[:num_rows], 0, table)])), whole[:num_rows])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_number_of_rows(model: Model, tokens: list[int], whole: Float32Array, num_threads: int) -> None:
    """Around the row tiles, what reads packed weights directly, the row blocks of a product and its chunks."""
    backend = native(model, num_threads=num_threads)
    for num_rows in (*range(1, 40), 63, 65, 95, 96, 97, 101, 192, 193, 255, 257, 300):
        table = list(range(-(-num_rows // 16)))
        assert_same_bits(backend.forward(forward_batch([Stretch(tokens[:num_rows], 0, table)])), whole[:num_rows])


@pytest.mark.parametrize("seed, num_threads, block_size", [(0, 1, 8), (1, 2, 16), (2, 3, 32), (3, 2, 24), (4, 5, 64)])
def test_mixtures(
    model: Model, tokens: list[int], whole: Float32Array, seed: int, num_threads: int, block_size: int
) -> None:
    """Short and long pasts, single tokens and chunks, in any number, over scattered blocks that others used before."""
    rng = np.random.default_rng(seed)
    num_blocks = 4096 // block_size
    backend = native(model, num_threads=num_threads, block_size=block_size, num_kv_blocks=num_blocks)
    for num_sequences in (1, 3, 8, 17, 40):
        free = rng.permutation(num_blocks).tolist()
        stretches: list[Stretch] = []
        for i in range(num_sequences):
            past = int(rng.choice([0, 1, 15, 63, 64, 65, 200])) if i else int(rng.choice([511, 512, 513, 1023, 1024]))
            length = int(rng.choice([1, 1, 1, 2, 7, 31, 75])) if i < 8 else 1
            num_needed = -(-(past + length) // block_size)
            if num_needed > len(free):
                break
            table = [free.pop() for _ in range(num_needed)]
            stretches.append(Stretch(tokens[past : past + length], past, table))
        pasts = [Stretch(tokens[: s.start], 0, s.block_ids[: -(-s.start // block_size)]) for s in stretches if s.start]
        backend.forward(forward_batch(pasts, last_rows_only=True))
        logits = backend.forward(forward_batch(stretches))
        assert_same_bits(logits, np.concatenate([whole[s.start : s.start + len(s.token_ids)] for s in stretches]))
