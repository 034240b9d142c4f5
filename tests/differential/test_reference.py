"""The reference backend against itself, however a text is cut up, and against Hugging Face transformers' goldens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ropeway.backends.batch import Float32Array
from ropeway.backends.reference import KvDtype, ReferenceBackend
from ropeway.errors import ConfigError
from ropeway.model.loading import Model, load_model
from support.batches import sample_batch
from support.forward_batches import Stretch, all_logits, forward_batch
from support.goldens import GOLDEN_MODELS, LOGIT_STRIDE, file_digest, golden
from support.random_gguf import ODD_MODEL, write_random_gguf

TOKEN_IDS = np.random.default_rng(1).integers(0, ODD_MODEL.vocab_size, 40).tolist()


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_random_gguf(tmp_path_factory.mktemp("odd") / "odd.gguf", ODD_MODEL))


def backend(model: Model, *, kv_dtype: KvDtype = "f32", block_size: int = 16) -> ReferenceBackend:
    return ReferenceBackend(model.program, model.tensors, num_kv_blocks=64, block_size=block_size, kv_dtype=kv_dtype)


def relative_error(logits: Float32Array, expected: Float32Array) -> float:
    """max |difference| / max |logit|, the worst position."""
    return float((np.abs(logits - expected).max(axis=-1) / np.abs(expected).max(axis=-1)).max())


@pytest.fixture(scope="module")
def whole(odd_model: Model) -> Float32Array:
    return all_logits(backend(odd_model), TOKEN_IDS)


class TestCuttingUp:
    @pytest.mark.parametrize("chunk_size", [1, 7, 16])
    def test_chunks(self, odd_model: Model, whole: Float32Array, chunk_size: int) -> None:
        assert relative_error(all_logits(backend(odd_model), TOKEN_IDS, chunk_size=chunk_size), whole) < 1e-5

    @pytest.mark.parametrize("block_size, block_ids", [(16, [9, 63, 2]), (8, [5, 4, 3, 2, 1]), (1, range(63, 23, -1))])
    def test_scattered_blocks(
        self, odd_model: Model, whole: Float32Array, block_size: int, block_ids: list[int]
    ) -> None:
        logits = all_logits(backend(odd_model, block_size=block_size), TOKEN_IDS, chunk_size=11, block_ids=block_ids)
        assert relative_error(logits, whole) < 1e-5

    def test_batch_mates(self, odd_model: Model, whole: Float32Array) -> None:
        """A decode, a second chunk and a fresh prompt in one step give each what it gets alone."""
        together = backend(odd_model)
        other = TOKEN_IDS[::-1]
        together.forward(forward_batch([Stretch(TOKEN_IDS[:39], 0, [0, 1, 2]), Stretch(other[:10], 0, [3])]))
        logits = together.forward(
            forward_batch(
                [Stretch(TOKEN_IDS[39:], 39, [0, 1, 2]), Stretch(other[10:30], 10, [3, 7]), Stretch([5, 6], 0, [8])]
            )
        )
        assert relative_error(logits[:1], whole[39:]) < 1e-5
        assert relative_error(logits[1:21], all_logits(backend(odd_model), other[:30])[10:]) < 1e-5
        assert relative_error(logits[21:], all_logits(backend(odd_model), [5, 6])) < 1e-5

    def test_only_the_rows_asked_for(self, odd_model: Model, whole: Float32Array) -> None:
        batch = forward_batch([Stretch(TOKEN_IDS, 0, [0, 1, 2])], last_rows_only=True)
        assert relative_error(backend(odd_model).forward(batch), whole[-1:]) < 1e-5

    def test_the_past_matters(self, odd_model: Model, whole: Float32Array) -> None:
        changed = [(TOKEN_IDS[0] + 1) % ODD_MODEL.vocab_size, *TOKEN_IDS[1:]]
        assert relative_error(all_logits(backend(odd_model), changed), whole) > 1e-2

    def test_f16_cache_is_close_but_rounds(self, odd_model: Model, whole: Float32Array) -> None:
        assert 1e-6 < relative_error(all_logits(backend(odd_model, kv_dtype="f16"), TOKEN_IDS), whole) < 5e-3


def test_sampling(odd_model: Model) -> None:
    one = backend(odd_model)
    logits = one.forward(forward_batch([Stretch(TOKEN_IDS, 0, [0, 1, 2])], last_rows_only=True))
    likeliest = int(logits.argmax())
    drawn = one.sample(logits, sample_batch(1))
    assert drawn.token_ids.tolist() == [likeliest]
    assert not drawn.is_failed.any()


def test_a_pool_without_blocks_is_refused(odd_model: Model) -> None:
    with pytest.raises(ConfigError, match="the KV pool needs blocks, not 0 of 16 tokens"):
        ReferenceBackend(odd_model.program, odd_model.tensors, num_kv_blocks=0)


class TestAgainstTransformers:
    """The gate of float32: max |difference| / max |logit| per position."""

    MAX_RELATIVE_ERROR = 1e-4

    @pytest.mark.parametrize("name", GOLDEN_MODELS)
    def test_random_models(self, tmp_path: Path, name: str) -> None:
        path = write_random_gguf(tmp_path / "model.gguf", GOLDEN_MODELS[name])
        expected = golden(f"random_{name}")
        assert np.array_equal(file_digest(path), expected["digest"]), (
            "the random model is not the one of its golden (a new numpy?): derive the goldens again, make oracle"
        )
        logits = all_logits(backend(load_model(path)), expected["token_ids"].tolist())
        assert relative_error(logits, expected["logits"]) < self.MAX_RELATIVE_ERROR

    def test_default_model(self, model_path: Path) -> None:
        expected = golden("default_logits")
        one = backend(load_model(model_path))
        token_ids, indptr = expected["token_ids"].tolist(), expected["prompt_indptr"]
        prompts = [token_ids[start:end] for start, end in zip(indptr[:-1], indptr[1:], strict=True)]
        logits = np.concatenate([all_logits(one, prompt) for prompt in prompts])
        allowed = self.MAX_RELATIVE_ERROR * expected["max_abs"]
        top_ids = expected["top_ids"].astype(np.int64)
        top_error = np.abs(np.take_along_axis(logits, top_ids, axis=1) - expected["top_logits"])
        strided_error = np.abs(logits[:, ::LOGIT_STRIDE] - expected["strided_logits"])
        assert (top_error.max(axis=1) < allowed).all()
        assert (strided_error.max(axis=1) < allowed).all()
        assert (np.abs(np.abs(logits).max(axis=1) - expected["max_abs"]) < allowed).all()
        # A mean error of every logit, of one sign, below a tenth of the gate.
        mean_error = np.abs(logits.sum(axis=1, dtype=np.float64) - expected["sum"]) / logits.shape[1]
        assert (mean_error < allowed / 10).all()
