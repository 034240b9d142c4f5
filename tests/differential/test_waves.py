"""Chunks that pass the layers over several steps: the same bits as those that pass them in one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.forward_batches import Stretch, all_logits, forward_batch
from tests.support.random_gguf import ODD_MODEL, RandomModel, write_random_gguf
from tests.support.recording_backend import RecordingBackend
from tests.support.waves import WavePacing

from ropeway.backends.batch import Backend, Float32Array, ForwardBatch, LayerSlice
from ropeway.backends.native import NativeBackend
from ropeway.backends.reference import ReferenceBackend
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request, SamplingParams
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.engine.engine import Engine
from ropeway.engine.runner import Runner
from ropeway.model.loading import Model, load_model
from ropeway.model.weights import TensorType

NUM_LAYERS, NUM_TOKENS, NUM_BLOCKS = 5, 1400, 120
MODELS = {
    "odd": ODD_MODEL,  # float weights: nothing is quantised where layers part
    "q4_1": RandomModel(weight_type=TensorType.Q4_1, head_type=TensorType.Q8_0),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    shape = replace(MODELS[request.param], num_layers=NUM_LAYERS, context_length=2048)
    return load_model(write_random_gguf(path, shape))


@pytest.fixture(scope="module")
def tokens(model: Model) -> list[int]:
    return np.random.default_rng(5).integers(0, model.program.vocab_size, NUM_TOKENS).tolist()


@pytest.fixture(scope="module")
def whole(model: Model, tokens: list[int]) -> Float32Array:
    return all_logits(native(model), tokens)


def native(model: Model, num_threads: int = 2) -> NativeBackend:
    return NativeBackend(model.program, model.tensors, num_kv_blocks=NUM_BLOCKS, num_threads=num_threads)


class Wave:
    """A chunk behind `past` of the tokens, and decodes of the same tokens beside it, on one backend."""

    def __init__(self, backend: Backend, tokens: list[int], past: int, num_tokens: int) -> None:
        self.backend, self.tokens = backend, tokens
        self.chunk = self._stretch(past, num_tokens, first_block=0)
        self.end = past + num_tokens
        self.next = [3, 70]  # of each decode
        others = [self._stretch(0, start, first_block) for start, first_block in zip(self.next, (90, 100), strict=True)]
        pasts = [*([self._stretch(0, past, first_block=0)] if past else []), *others]
        backend.forward(forward_batch(pasts, last_rows_only=True))

    def _stretch(self, start: int, num_tokens: int, first_block: int) -> Stretch:
        num_blocks = -(-(start + num_tokens) // self.backend.block_size)
        return Stretch(self.tokens[start : start + num_tokens], start, range(first_block, first_block + num_blocks))

    def step(self, layer_slice: LayerSlice) -> tuple[list[int], Float32Array]:
        """One slice beside a token of each decode: positions of the tokens whose logits come, and these."""
        decodes = [self._stretch(at, 1, block) for at, block in zip(self.next, (90, 100), strict=True)]
        positions = list(self.next)
        self.next = [at + 1 for at in self.next]
        batch = forward_batch([*decodes, self.chunk])
        if layer_slice.is_last:
            positions += range(self.chunk.start, self.end)
        batch = replace(batch, out_rows=batch.out_rows[: len(positions)], layer_slice=layer_slice)
        return positions, self.backend.forward(batch)

    def decode(self) -> tuple[list[int], Float32Array]:
        """The token behind the chunk, which reads all that the wave has written."""
        return [self.end], self.backend.forward(forward_batch([self._stretch(self.end, 1, first_block=0)]))


def assert_same_bits(found: tuple[list[int], Float32Array], whole: Float32Array) -> None:
    positions, logits = found
    np.testing.assert_array_equal(logits.view(np.int32), whole[positions].view(np.int32))


@pytest.mark.parametrize("num_slices", range(1, NUM_LAYERS + 1))
@pytest.mark.parametrize("past, num_tokens", [(0, 1), (0, 40), (17, 7), (513, 12), (600, 700)])
def test_a_wave_computes_the_same_bits(
    model: Model, tokens: list[int], whole: Float32Array, past: int, num_tokens: int, num_slices: int
) -> None:
    """700 tokens beside decodes take two passes in each step."""
    wave = Wave(native(model, num_threads=1 + num_slices % 2), tokens, past, num_tokens)
    for index in range(num_slices):
        assert_same_bits(wave.step(LayerSlice(index, num_slices)), whole)
    assert_same_bits(wave.decode(), whole)


def test_a_wave_that_is_dropped_leaves_nothing(model: Model, tokens: list[int], whole: Float32Array) -> None:
    backend = native(model)
    dropped = Wave(backend, tokens, 100, 60)
    for index in range(3):
        assert_same_bits(dropped.step(LayerSlice(index, NUM_LAYERS)), whole)
    wave = Wave(backend, tokens, 64, 30)
    for index in range(2):
        assert_same_bits(wave.step(LayerSlice(index, 2)), whole)
    assert_same_bits(wave.decode(), whole)


def test_what_is_no_next_slice_is_refused(model: Model, tokens: list[int]) -> None:
    wave = Wave(native(model), tokens, 32, 8)
    assert wave.backend.num_layers == NUM_LAYERS
    for layer_slice in (LayerSlice(1, 2), LayerSlice(0, NUM_LAYERS + 1), LayerSlice(2, 2), LayerSlice(0, 0)):
        with pytest.raises(ValueError, match="slice"):
            wave.step(layer_slice)
    wave.step(LayerSlice(0, 3))
    for layer_slice in (LayerSlice(2, 3), LayerSlice(1, 2)):
        with pytest.raises(ValueError, match="does not follow"):
            wave.step(layer_slice)
    everything = forward_batch([Stretch(tokens[:4], 0, [0])])
    with pytest.raises(ValueError, match="every layer"):
        wave.backend.forward(replace(everything, layer_slice=LayerSlice(0, 2)))
    wave.step(LayerSlice(1, 3))
    wave.chunk = replace(wave.chunk, token_ids=wave.chunk.token_ids[:-1])
    with pytest.raises(ValueError, match="does not follow"):
        wave.step(LayerSlice(2, 3))


@pytest.mark.parametrize("num_slices", [2, NUM_LAYERS])
def test_the_reference_computes_the_same(model: Model, tokens: list[int], num_slices: int) -> None:
    """Close, not equal: its library multiplies other numbers of rows in another order, and an f16 in the cache may
    round the other way."""
    backend = ReferenceBackend(model.program, model.tensors, num_kv_blocks=NUM_BLOCKS)
    assert backend.num_layers == NUM_LAYERS
    whole = all_logits(backend, tokens[:160])
    wave = Wave(backend, tokens, 21, 30)
    for index in range(num_slices):
        positions, logits = wave.step(LayerSlice(index, num_slices))
        np.testing.assert_allclose(logits, whole[positions], atol=1e-4 * np.abs(whole).max())
    positions, logits = wave.decode()
    np.testing.assert_allclose(logits, whole[positions], atol=1e-4 * np.abs(whole).max())


class FailingOnce(RecordingBackend):
    """Fails a forward pass in the middle of the first wave."""

    has_failed = False

    def forward(self, batch: ForwardBatch) -> Float32Array:
        if not self.has_failed and batch.layer_slice is not None and batch.layer_slice.index == 1:
            self.has_failed = True
            raise RuntimeError("a pass fails")
        return super().forward(batch)


def test_the_wave_after_a_failed_step_starts_over(model: Model, tokens: list[int], whole: Float32Array) -> None:
    """The keys of the sequences that fail are written again by the one that gets their blocks."""
    backend = FailingOnce(native(model))
    scheduler = Scheduler(
        SchedulerLimits(4, 64, 512), KVManager([NUM_BLOCKS], 16), pacing=WavePacing(64, backend.num_layers)
    )
    engine = Engine(scheduler, Runner(backend, max_num_seqs=4, max_model_len=512), lambda: 0.0)
    ends = {}
    for name in ("fails", "goes on"):
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        engine.submit(Request(name, tuple(tokens[:200]), params, 4, seed=1))
        drawn: list[int] = []
        while engine.has_work:
            for event in engine.step():
                drawn += event.token_ids
                ends[name] = event.finish_reason
            scheduler.check_invariants()
    assert ends == {"fails": "error", "goes on": "length"}
    assert drawn[0] == int(whole[199].argmax())


def test_the_reference_takes_waves_from_the_runner_too(model: Model, tokens: list[int], whole: Float32Array) -> None:
    backend = ReferenceBackend(model.program, model.tensors, num_kv_blocks=NUM_BLOCKS)
    scheduler = Scheduler(
        SchedulerLimits(4, 64, 512), KVManager([NUM_BLOCKS], 16), pacing=WavePacing(64, backend.num_layers)
    )
    engine = Engine(scheduler, Runner(backend, max_num_seqs=4, max_model_len=512), lambda: 0.0)
    engine.submit(Request("r", tuple(tokens[:200]), SamplingParams(temperature=0.0, max_tokens=1), 1, seed=1))
    (event,) = [event for _ in range(40) for event in engine.step() if event.token_ids]
    assert event.token_ids == (int(whole[199].argmax()),) and not engine.has_work
