"""The native backend against the reference, on the same file: every weight type, odd shapes, every instruction set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.forward_batches import Stretch, all_logits, forward_batch
from tests.support.random_gguf import ODD_MODEL, RandomModel, write_random_gguf

from ropeway import _native
from ropeway.backends.batch import BlockTables, Float32Array, ForwardBatch
from ropeway.backends.native import NativeBackend
from ropeway.backends.reference import ReferenceBackend
from ropeway.errors import ConfigError, OutOfMemoryError, UnsupportedIsaError
from ropeway.model.loading import Model, load_model
from ropeway.model.program import Embed
from ropeway.model.weights import TensorType

NUM_TOKENS = 150
# Largest |difference| / largest |logit|. Measured on these models: at most 9e-5 (the sixteen-bit cache rounds values
# that differ in the last bit to neighbours) and 0.032 (activations in 8 bits).
FLOAT_TOLERANCE = 3e-4
INT8_TOLERANCE = 0.06

LINEAR_ROPE = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}

MODELS = {
    "plain": RandomModel(),
    "linear rope": RandomModel(metadata=LINEAR_ROPE),
    "odd": ODD_MODEL,
    "one head": RandomModel(num_heads=1, num_kv_heads=1, head_dim=8),
    "seven heads": RandomModel(num_heads=7, num_kv_heads=1, head_dim=40, hidden_size=72, vocab_size=17),
    "narrow heads": replace(
        ODD_MODEL, head_dim=18, rotary_dim=12, hidden_size=100, intermediate_size=90, weight_type=TensorType.BF16
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(directory: Path, model: RandomModel) -> Model:
    path = directory / f"{abs(hash(repr(model)))}.gguf"
    return load_model(path if path.exists() else write_random_gguf(path, model))


def native(model: Model, **options: object) -> NativeBackend:
    return NativeBackend(model.program, model.tensors, **{"num_kv_blocks": 64, **options})  # type: ignore[arg-type]


def token_ids(model: Model, num_tokens: int = NUM_TOKENS) -> list[int]:
    return np.random.default_rng(1).integers(0, model.program.vocab_size, num_tokens).tolist()


def relative_error(logits: Float32Array, expected: Float32Array) -> float:
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def reference_logits(model: Model, ids: list[int]) -> Float32Array:
    return all_logits(ReferenceBackend(model.program, model.tensors, num_kv_blocks=64), ids)


def test_linear_scaling_stretches_positions(directory: Path) -> None:
    """So that its case below is more than the plain one again."""
    plain, stretched = load(directory, MODELS["plain"]), load(directory, MODELS["linear rope"])
    ids = token_ids(plain)
    assert relative_error(all_logits(native(stretched), ids), all_logits(native(plain), ids)) > 100 * FLOAT_TOLERANCE


@pytest.mark.parametrize("isa", _native.supported_isas())
class TestAgainstTheReference:
    @pytest.mark.parametrize("name", MODELS)
    def test_shapes(self, directory: Path, name: str, isa: str) -> None:
        model = load(directory, MODELS[name])
        ids = token_ids(model)
        assert relative_error(all_logits(native(model, isa=isa), ids), reference_logits(model, ids)) < FLOAT_TOLERANCE

    @pytest.mark.parametrize("weight_type", TensorType)
    def test_weight_types(self, directory: Path, weight_type: TensorType, isa: str) -> None:
        model = load(directory, RandomModel(weight_type=weight_type, hidden_size=96, vocab_size=323, has_bias=True))
        ids = token_ids(model)
        is_quantised = weight_type in (TensorType.Q8_0, TensorType.Q4_0, TensorType.Q4_1)
        error = relative_error(all_logits(native(model, isa=isa), ids), reference_logits(model, ids))
        assert error < (INT8_TOLERANCE if is_quantised else FLOAT_TOLERANCE)

    def test_a_long_context(self, directory: Path, isa: str) -> None:
        """Several splits of the key axis, merged, for prompt rows and for a lone token."""
        model = load(directory, RandomModel(num_layers=1, context_length=2048, vocab_size=50))
        ids = token_ids(model, 1100)
        backend = native(model, isa=isa, num_kv_blocks=80)
        reference = ReferenceBackend(model.program, model.tensors, num_kv_blocks=80)
        table = list(range(69))
        for chunk, start in ((ids[:1099], 0), (ids[1099:], 1099)):
            batch = forward_batch([Stretch(chunk, start, table)], last_rows_only=True)
            assert relative_error(backend.forward(batch), reference.forward(batch)) < FLOAT_TOLERANCE


def test_instruction_sets_agree_bit_for_bit(directory: Path) -> None:
    for shape in (ODD_MODEL, RandomModel(weight_type=TensorType.Q4_1), RandomModel(weight_type=TensorType.Q8_0)):
        model = load(directory, shape)
        first, *others = (all_logits(native(model, isa=isa), token_ids(model)) for isa in _native.supported_isas())
        for other in others:
            np.testing.assert_array_equal(first.view(np.int32), other.view(np.int32))


def test_mixed_types_share_a_phase(directory: Path) -> None:
    """A float and a quantised weight may read the same activations."""
    model = load(directory, RandomModel(weight_type=TensorType.Q4_0, head_type=TensorType.F16))
    ids = token_ids(model)
    assert relative_error(all_logits(native(model), ids), reference_logits(model, ids)) < INT8_TOLERANCE


def test_block_sizes(directory: Path) -> None:
    model = load(directory, ODD_MODEL)
    ids = token_ids(model)
    whole = all_logits(native(model, block_size=16), ids)
    for block_size in (8, 24, 64):
        logits = all_logits(native(model, block_size=block_size), ids, chunk_size=50)
        np.testing.assert_array_equal(logits.view(np.int32), whole.view(np.int32))


def test_logits_outlive_the_next_forward(directory: Path) -> None:
    """A holder of an older result reads memory that is still its own or rewritten, never freed."""
    model = load(directory, RandomModel())
    backend = native(model)
    held = backend.forward(forward_batch([Stretch([1], 0, [0])]))
    backend.forward(forward_batch([Stretch(token_ids(model), 0, list(range(10)))]))
    assert held.shape == (1, model.program.vocab_size) and np.isfinite(held).all()


def test_no_rows_are_wanted(directory: Path) -> None:
    """A prompt's early chunk yields no logits, and its keys and values are there for the next."""
    model = load(directory, RandomModel())
    ids = token_ids(model, 20)
    batch = forward_batch([Stretch(ids[:19], 0, [3, 4])])
    backend = native(model)
    assert backend.forward(replace(batch, out_rows=np.empty(0, np.int32))).shape == (0, model.program.vocab_size)
    last = backend.forward(forward_batch([Stretch(ids[19:], 19, [3, 4])]))
    np.testing.assert_array_equal(last[0], all_logits(native(model), ids)[-1])


def test_profile(directory: Path) -> None:
    model = load(directory, RandomModel(num_layers=3))
    backend = native(model)
    backend.set_profiling(True)
    all_logits(backend, token_ids(model), chunk_size=75)
    profile = backend.profile()
    assert {"attention": 6, "attn_q+attn_k+attn_v": 6, "ffn_gate+ffn_up": 6}.items() <= {
        label: runs for label, (runs, _) in profile.items()
    }.items()
    assert all(seconds >= 0 for _, seconds in profile.values()) and sum(s for _, s in profile.values()) > 0
    backend.set_profiling(False)
    all_logits(backend, token_ids(model))
    assert all(entry == (0, 0.0) for entry in backend.profile().values())


@pytest.mark.parametrize("weight_type", [TensorType.Q4_0, TensorType.F16])
def test_work_is_counted(directory: Path, weight_type: TensorType) -> None:
    """Two sequences, 5 tokens after 3 and 1 after 20, logits of each last one."""
    model = load(directory, RandomModel(weight_type=weight_type))
    backend = native(model)
    all_logits(backend, token_ids(model, 3))
    all_logits(backend, token_ids(model, 20), block_ids=[5, 6])
    before, _ = backend.work, backend.take_calls()
    batch = forward_batch([Stretch([1] * 5, 3, [0]), Stretch([2], 20, [5, 6])], last_rows_only=True)
    backend.forward(batch)
    int8, f32, read = (now - then for now, then in zip(backend.work, before, strict=True))

    head = model.program.vocab_size * model.config.hidden_size
    shapes = [tensor.shape for name, tensor in model.tensors.items() if len(tensor.shape) == 2 and "blk." in name]
    layer = sum(n * k for n, k in shapes) // model.config.num_layers
    last = [
        s for name, t in model.tensors.items() if "blk.0." in name and "attn_" not in name and len(s := t.shape) == 2
    ]
    last.append(model.tensors["blk.0.attn_output.weight"].shape)
    after_attention = sum(n * k for n, k in last)
    # What follows the last attention runs on the 2 selected rows only.
    products = 6 * (layer * model.config.num_layers - after_attention) + 2 * (after_attention + head)
    heads = model.config.num_heads * model.config.head_dim * model.config.num_layers
    attention = 2 * heads * (4 + 5 + 6 + 7 + 8 + 21)
    quantised = weight_type is TensorType.Q4_0
    assert int8 == (products if quantised else 0)
    assert f32 == attention + (0 if quantised else products)
    kv_bytes = 2 * 2 * model.config.num_kv_heads * model.config.head_dim * model.config.num_layers * (8 + 21)
    assert read == backend.packed_bytes + kv_bytes

    (call,) = backend.take_calls()
    assert all(seconds >= 0 for seconds in call) and call[0] > 0
    assert backend.take_calls() == []


def test_memory_is_reported(directory: Path) -> None:
    model = load(directory, RandomModel(weight_type=TensorType.Q4_0))
    backend = native(model, num_kv_blocks=10)
    assert backend.kv_bytes == 10 * 16 * 2 * model.config.num_layers * 2 * model.config.num_kv_heads * 16
    matrices = [tensor for tensor in model.tensors.values() if len(tensor.shape) == 2]
    assert backend.packed_bytes <= 1.15 * sum(tensor.data.nbytes for tensor in matrices)


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return load(directory, RandomModel())


class TestRefusals:
    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"token_ids": [320]}, "token id 320 of a vocabulary of 320"),
            ({"token_ids": [-1]}, "token id -1"),
            ({"positions": [3]}, "position 3, not 0"),
            ({"positions": [0, 1]}, "2 positions for 1 tokens"),
            ({"query_indptr": [0]}, "query_indptr"),
            ({"query_indptr": [0, 2]}, "query_indptr"),
            ({"kv_lens": [0]}, "kv_len 0"),
            ({"kv_lens": [2_000_000_000], "positions": [1_999_999_999]}, "125000000 blocks"),
            ({"out_rows": [1]}, "out_rows"),
            ({"out_rows": [-1]}, "out_rows"),
            ({"out_rows": [0, 0]}, "out_rows"),
        ],
    )
    def test_batches_that_do_not_fit(self, model: Model, changes: dict[str, list[int]], message: str) -> None:
        batch = forward_batch([Stretch([5], 0, [0])])
        arrays = {name: np.array(values, np.int32) for name, values in changes.items()}
        with pytest.raises(ValueError, match=message):
            native(model).forward(replace(batch, **arrays))

    @pytest.mark.parametrize(
        "block_ids, offsets, message",
        [
            ([64], [0], "block 64 of a pool of 64"),
            ([-1], [0], "block -1"),
            ([0], [1], "1 blocks at 1"),
            ([0], [-1], "at -1"),
            ([0], [2**62], "blocks at"),
            ([0], [0, 0], "2 block tables for 1"),
        ],
    )
    def test_block_tables_that_do_not_fit(
        self, model: Model, block_ids: list[int], offsets: list[int], message: str
    ) -> None:
        tables = (BlockTables(np.array(block_ids, np.int32), np.array(offsets, np.int64)),)
        batch: ForwardBatch = replace(forward_batch([Stretch([5], 0, [0])]), tables=tables)
        with pytest.raises(ValueError, match=message):
            native(model).forward(batch)

    def test_no_table(self, model: Model) -> None:
        with pytest.raises(ValueError, match="0 block tables for 1 cache groups"):
            native(model).forward(replace(forward_batch([Stretch([5], 0, [0])]), tables=()))

    def test_wrong_types(self, model: Model) -> None:
        batch = forward_batch([Stretch([5], 0, [0])])
        with pytest.raises(ValueError, match="token_ids has the wrong type"):
            native(model).forward(replace(batch, token_ids=batch.token_ids.astype(np.int64)))

    def test_no_backend_of_no_use(self, model: Model) -> None:
        for options in ({"num_kv_blocks": 0}, {"block_size": 12}, {"block_size": 0}, {"num_threads": 0}):
            with pytest.raises(ConfigError):
                native(model, **options)

    def test_more_memory_than_there_is(self, model: Model) -> None:
        with pytest.raises(OutOfMemoryError, match=r"GiB.*ask for at most \d+ blocks"):
            native(model, num_kv_blocks=2**31 - 1)

    def test_unknown_instruction_set(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UnsupportedIsaError, match=r"'sse9'.*scalar"):
            native(model, isa="sse9")
        monkeypatch.setenv("ROPEWAY_ISA", "neon")
        with pytest.raises(UnsupportedIsaError, match="ROPEWAY_ISA.*'neon'"):
            native(model)


@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_an_embedding_that_is_the_head_too_is_read_where_it_is_packed(directory: Path, weight_type: str) -> None:
    """The same bits as of rows of the file, which no page is mapped of then."""
    model = load(directory, RandomModel(weight_type=TensorType(weight_type), vocab_size=331))
    embed, *others = model.program.ops
    assert isinstance(embed, Embed)
    untied = replace(model.program, ops=(replace(embed, weight=replace(embed.weight, name="copy")), *others))
    tensors = {**model.tensors, "copy": model.tensors[embed.weight.name]}
    ids = token_ids(model)
    expected = all_logits(NativeBackend(untied, tensors, num_kv_blocks=64), ids)
    np.testing.assert_array_equal(all_logits(native(model), ids), expected)
