"""Reading model files: what is well-formed loads exactly, what is not is refused with one of two errors."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ropeway.errors import ModelFileError, UnsupportedModelError
from ropeway.model.architectures import build_program
from ropeway.model.gguf import GgufFile
from ropeway.model.loading import load_model
from ropeway.model.weights import Tensor, TensorType, dequantize
from support.random_gguf import (
    ALIGNMENT,
    ODD_MODEL,
    RandomModel,
    TensorSource,
    requantize_gguf,
    write_gguf,
    write_random_gguf,
)

# No tokenizer of 256 bytes: the header is short, so that a fuzzer hits something that matters.
TINY = RandomModel(
    num_layers=1,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=32,
    vocab_size=40,
    weight_type=TensorType.Q8_0,
    metadata={
        "tokenizer.ggml.tokens": [f"t{i}é" for i in range(8)],
        "tokenizer.ggml.scores": np.arange(8, dtype=np.float32),
        "tokenizer.ggml.add_bos_token": False,
    },
)


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TINY)


@pytest.fixture
def open_bytes(tmp_path: Path) -> Callable[[bytes], GgufFile]:
    def open_(data: bytes) -> GgufFile:
        path = tmp_path / "made.gguf"
        path.write_bytes(data)
        return GgufFile.open(path)

    return open_


def header(num_tensors: int = 0, num_metadata: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, value_type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def record(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    """A tensor record; shape as the file has it, fastest first."""
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)


class TestReading:
    def test_every_kind_of_metadata_comes_back(self, tmp_path: Path) -> None:
        metadata: dict[str, object] = {
            "text": "naïve",
            "empty": "",
            "yes": True,
            "small": 7,
            "negative": -(2**40),
            "half": 0.5,
            "strings": ["a", "", "日本"],
            "none": [],
        }
        arrays = {
            dtype: np.array([0, 1, 1], dtype)
            for dtype in ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?", "u8", "i8", "f8")
        }
        file = GgufFile.open(write_gguf(tmp_path / "m.gguf", {**metadata, **arrays}, []))
        for key, value in metadata.items():
            assert file.metadata[key] == value
            assert type(file.metadata[key]) is type(value)
        for key, array in arrays.items():
            read = file.metadata[key]
            assert isinstance(read, np.ndarray)
            assert read.dtype == array.dtype
            assert np.array_equal(read, array)

    @pytest.mark.parametrize("value_type, packed, value", [
        (0, b"\xff", 255), (1, b"\xff", -1), (2, b"\xff\xff", 65535), (3, b"\xff\xff", -1), (5, b"\xff" * 4, -1),
        (10, b"\xff" * 8, 2**64 - 1), (12, struct.pack("<d", 0.1), 0.1),
    ])  # fmt: skip
    def test_scalars_of_every_width(
        self, open_bytes: Callable[[bytes], GgufFile], value_type: int, packed: bytes, value: float
    ) -> None:
        assert open_bytes(header(0, 1) + entry("k", value_type, packed)).metadata == {"k": value}

    def test_nested_arrays(self, open_bytes: Callable[[bytes], GgufFile]) -> None:
        inner = struct.pack("<IQ2H", 2, 2, 5, 6)
        nested = open_bytes(header(0, 1) + entry("k", 9, struct.pack("<IQ", 9, 2) + inner + inner)).metadata["k"]
        assert isinstance(nested, list)
        assert [list(part) for part in nested] == [[5, 6], [5, 6]]

    @pytest.mark.parametrize("version", [2, 3])
    @pytest.mark.parametrize("alignment", [None, 64, 4096])
    def test_tensors_come_back(self, tmp_path: Path, version: int, alignment: int | None) -> None:
        values = {f"t{i}": np.random.default_rng(i).standard_normal((3, 5), np.float32) for i in range(3)}
        sources = [TensorSource(n, TensorType.F32, v.shape, lambda v=v: [v[:1], v[1:]]) for n, v in values.items()]
        metadata = {} if alignment is None else {"general.alignment": alignment}
        file = GgufFile.open(write_gguf(tmp_path / "m.gguf", metadata, sources, version=version))
        assert file.version == version
        assert list(file.tensors) == list(values)
        for name, value in values.items():
            assert np.array_equal(dequantize(file.tensors[name]), value)

    def test_tensors_outlive_the_file_object(self, tiny_path: Path) -> None:
        tensor = GgufFile.open(tiny_path).tensors["output_norm.weight"]
        assert np.isfinite(dequantize(tensor)).all()
        assert not tensor.data.flags.writeable


class TestDequantize:
    """Against the formula of each format, one value at a time."""

    @staticmethod
    def check(tensor_type: TensorType, one_value: Callable[[bytes, int], float]) -> None:
        rng = np.random.default_rng(3)
        blocks = [bytearray(rng.bytes(tensor_type.block_bytes)) for _ in range(6)]
        for block in blocks:
            block[:2] = np.float16(rng.standard_normal()).tobytes()
            if tensor_type is TensorType.Q4_1:
                block[2:4] = np.float16(rng.standard_normal()).tobytes()
        data = np.frombuffer(b"".join(blocks), np.uint8)
        values = dequantize(Tensor("t", tensor_type, (2, 96), data))
        expected = [one_value(bytes(block), i) for block in blocks for i in range(32)]
        assert values.shape == (2, 96)
        assert values.dtype == np.float32
        assert values.ravel().tolist() == expected

    @staticmethod
    def half(data: bytes) -> np.float32:
        return np.float32(np.frombuffer(data[:2], "<f2")[0])

    @staticmethod
    def nibble(codes: bytes, i: int) -> int:
        return codes[i] & 15 if i < 16 else codes[i - 16] >> 4

    def test_q8_0(self) -> None:
        self.check(TensorType.Q8_0, lambda b, i: float(self.half(b) * np.float32(np.int8(np.uint8(b[2 + i])))))

    def test_q4_0(self) -> None:
        self.check(TensorType.Q4_0, lambda b, i: float(self.half(b) * np.float32(self.nibble(b[2:], i) - 8)))

    def test_q4_1(self) -> None:
        self.check(
            TensorType.Q4_1,
            lambda b, i: float(self.half(b) * np.float32(self.nibble(b[4:], i)) + self.half(b[2:])),
        )

    def test_floats(self) -> None:
        values = np.array([[0.0, -1.5, 3.140625, 1e30], [-0.0, 2.0**-120, np.inf, -7.0]], np.float32)
        bf16 = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8).ravel()
        truncated = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        assert np.array_equal(dequantize(Tensor("t", TensorType.BF16, (2, 4), bf16)), truncated)
        assert np.array_equal(dequantize(Tensor("t", TensorType.F32, (2, 4), values.view(np.uint8).ravel())), values)
        halves = values[:, :3].astype("<f2")
        assert np.array_equal(
            dequantize(Tensor("t", TensorType.F16, (2, 3), halves.view(np.uint8).ravel())), halves.astype(np.float32)
        )


class TestRefusals:
    @pytest.mark.parametrize(
        "data, message",
        [
            (b"", "empty"),
            (b"GG", "not a GGUF file"),
            (b"PK\3\4" + bytes(60), "not a GGUF file"),
            (b"GGUF", "needs 4 bytes"),
            (header(0, 2**64 - 1), "metadata entries cannot be 18446744073709551615"),
            (header(2**63, 0), "tensors cannot be"),
            (header(0, 1) + struct.pack("<Q", 2**63) + bytes(16), "needs 9223372036854775808 bytes"),
            (header(0, 1) + entry(b"\xff\xfe", 0, b"\1"), "not valid UTF-8"),
            (header(0, 1) + entry("k", 8, string(b"\xc3\x28")), "not valid UTF-8"),
            (header(0, 2) + entry("k", 0, b"\1") * 2, "'k' appears twice"),
            (header(0, 1) + entry("k", 13, b"\1"), "unknown value type 13"),
            (header(0, 1) + entry("k", 7, b"\2"), "neither 0 nor 1"),
            (header(0, 1) + entry("k", 9, struct.pack("<IQ", 7, 2) + b"\1\2"), "neither 0 nor 1"),
            (header(0, 1) + entry("k", 9, struct.pack("<IQ", 99, 0)), "unknown element type 99"),
            (header(0, 1) + entry("k", 9, struct.pack("<IQ", 4, 2**62)), "needs"),
            (header(0, 1) + entry("k", 9, struct.pack("<IQ", 8, 2**62)), "cannot be"),
            (header(0, 1) + entry("k", 9, struct.pack("<IQ", 9, 2**62)), "cannot be"),
            (header(0, 1) + entry("k", 9, struct.pack("<IQQ", 8, 1, 2**64 - 1)), "string 0 of 'k'"),
            (header(0, 1) + entry("k", 9, struct.pack("<IQQ", 8, 2, 8) + bytes(8)), "ends inside string 1"),
            (header(0, 1) + entry("k", 9, struct.pack("<IQ", 8, 1) + string(b"\xff")), "string 0 of 'k'.*UTF-8"),
            (header(0, 1) + entry("k", 9, struct.pack("<IQ", 9, 1) * 5 + struct.pack("<IQ", 0, 0)), "more than 4 deep"),
            (header(0, 1) + entry("general.alignment", 4, struct.pack("<I", 24)), "power of two"),
            (header(0, 1) + entry("general.alignment", 4, struct.pack("<I", 0)), "power of two"),
            (header(0, 1) + entry("general.alignment", 8, string("32")), "power of two"),
            (header(0, 1) + entry("general.alignment", 9, struct.pack("<IQ", 4, 1) + bytes(4)), "power of two"),
            (header(1) + record("t", (4,), 0, 0) + bytes(15), "ends at byte"),
            (header(1) + record("t", (2**63, 2**63, 2**63, 2), 0, 0) + bytes(64), "ends at byte"),
            (header(1) + record("t", (4,), 0, 2**64 - 32) + bytes(64), "ends at byte"),
            (header(1) + record("t", (4,), 0, 8) + bytes(64), "not a multiple of 32"),
            (header(1) + record("t", (0,), 0, 0) + bytes(64), "whole blocks"),
            (header(1) + record("t", (33,), 8, 0) + bytes(640), "whole blocks of 32"),
            (header(1) + record("t", (), 0, 0) + bytes(64), "0 dimensions"),
            (header(1) + record("t", (1, 1, 1, 1, 1), 0, 0) + bytes(64), "5 dimensions"),
            (header(2) + record("t", (4,), 0, 0) * 2 + bytes(64), "'t' appears twice"),
            (header(2) + record("a", (16,), 0, 0) + record("b", (4,), 0, 32) + bytes(128), "'a' and 'b' overlap"),
        ],
    )  # fmt: skip
    def test_corrupt(self, open_bytes: Callable[[bytes], GgufFile], data: bytes, message: str) -> None:
        with pytest.raises(ModelFileError, match=message) as caught:
            open_bytes(data)
        assert not isinstance(caught.value, UnsupportedModelError)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600

    @pytest.mark.parametrize(
        "data, message",
        [
            (header(version=1), "version 1 is not supported"),
            (header(version=4), "version 4 is not supported"),
            (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 3, big-endian is not supported"),
            (
                header(1) + record("t", (256,), 12, 0) + bytes(200),
                "'t' has type Q4_K, .* F32, F16, BF16, Q8_0, Q4_0, Q4_1",
            ),
            (header(1) + record("t", (256,), 77, 0) + bytes(200), "'t' has type 77"),
        ],
    )
    def test_unsupported(self, open_bytes: Callable[[bytes], GgufFile], data: bytes, message: str) -> None:
        with pytest.raises(UnsupportedModelError, match=message):
            open_bytes(data)

    def test_no_such_file_and_directory(self, tmp_path: Path) -> None:
        for path in (tmp_path / "none.gguf", tmp_path):
            with pytest.raises(ModelFileError, match="cannot read the model file: .*; check the path"):
                GgufFile.open(path)

    def test_long_names_are_cut_and_escaped(self, open_bytes: Callable[[bytes], GgufFile]) -> None:
        with pytest.raises(ModelFileError) as caught:
            open_bytes(header(0, 1) + entry("bad\n" * 100_000, 99, b"\1"))
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


class TestLoading:
    @pytest.mark.parametrize("tensor_type", TensorType)
    def test_tiny_models_load(self, tmp_path: Path, tensor_type: TensorType) -> None:
        model = load_model(write_random_gguf(tmp_path / "m.gguf", RandomModel(weight_type=tensor_type)))
        assert model.config.num_layers == 2
        assert model.program.vocab_size == 320
        assert set(model.tensors) == set(model.program.weights)
        assert model.tensors["blk.1.ffn_down.weight"].type is tensor_type
        assert model.program.weights["blk.1.ffn_down.weight"].shape == (64, 96)
        assert "output.weight" not in model.program.weights

    def test_odd_model_loads(self, tmp_path: Path) -> None:
        model = load_model(write_random_gguf(tmp_path / "m.gguf", ODD_MODEL))
        assert (model.config.head_dim, model.config.rotary_dim) == (48, 32)
        assert model.program.weights["output.weight"].shape == (1003, 160)
        assert model.program.weights["rope_freqs.weight"].shape == (16,)
        assert model.program.weights["blk.2.attn_k.bias"].shape == (96,)
        assert model.program.buffers["q"] == 480

    def test_requantised_copy(self, tmp_path: Path) -> None:
        source = write_random_gguf(tmp_path / "a.gguf", RandomModel())
        copy = load_model(requantize_gguf(source, tmp_path / "b.gguf", TensorType.Q8_0))
        original = load_model(source)
        assert copy.config == original.config
        for name, tensor in original.tensors.items():
            assert copy.tensors[name].type is (TensorType.Q8_0 if len(tensor.shape) > 1 else TensorType.F32)
            assert np.abs(dequantize(copy.tensors[name]) - dequantize(tensor)).max() < 0.02

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"llama.block_count": None}, "llama.block_count is missing"),
            ({"llama.block_count": 0}, "llama.block_count must be an integer from 1"),
            ({"llama.block_count": 2**31 - 1}, "declares 2147483647 layers"),
            ({"llama.block_count": 2**40}, "must be an integer"),
            ({"llama.block_count": 2}, "layer 1 has no attn_norm.weight"),
            ({"llama.embedding_length": -1}, "must be an integer"),
            ({"llama.embedding_length": "wide"}, "must be an integer from 1 to 2147483647, not 'wide'"),
            ({"llama.embedding_length": True}, "must be an integer"),
            ({"llama.embedding_length": np.arange(4)}, "must be an integer"),
            ({"llama.embedding_length": 33, "llama.attention.key_length": None}, "33 does not divide among 2 heads"),
            ({"llama.attention.head_count": 3, "llama.attention.head_count_kv": 2}, "3 attention heads do not divide"),
            ({"llama.attention.head_count_kv": np.array([1, 1], np.uint32)}, "head_count_kv must be an integer"),
            ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "must be a positive finite number"),
            ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "must be a positive finite number"),
            ({"llama.rope.freq_base": float("inf")}, "must be a positive finite number"),
            ({"llama.rope.dimension_count": 15}, "rope over 15 entries"),
            ({"llama.rope.dimension_count": 18}, "rope over 18 entries of heads of 16"),
            ({"llama.rope.scaling.type": "linear"}, "rope.scaling.factor is missing"),
            ({"llama.vocab_size": 7}, "the vocabulary has 8 tokens"),
            ({"llama.vocab_size": 41}, r"token_embd.weight has shape \(40, 32\), but the model needs \(41, 32\)"),
            ({"tokenizer.ggml.tokens": "none"}, "must be an array of strings"),
            ({"general.architecture": 7}, "architecture '7' is not supported"),
            ({"llama.feed_forward_length": 64}, r"blk.0.ffn_gate.weight has shape \(32, 32\)"),
        ],
    )  # fmt: skip
    def test_wrong_hyperparameters(self, tmp_path: Path, changes: dict[str, object], message: str) -> None:
        model = replace(TINY, metadata={**(TINY.metadata or {}), **changes})
        with pytest.raises(ModelFileError, match=message):
            load_model(write_random_gguf(tmp_path / "m.gguf", model))

    def test_more_layers_than_tensors_are_refused_before_any_is_described(self, tmp_path: Path) -> None:
        config = load_model(write_random_gguf(tmp_path / "m.gguf", TINY)).config
        names = {"blk.2147483646.attn_norm.weight", "token_embd.weight"}
        with pytest.raises(ModelFileError, match="declares 2147483647 layers and has 2 tensors"):
            build_program(replace(config, num_layers=2**31 - 1), names)

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; use a model of: llama"),
            ({"general.architecture": None}, "architecture 'None' is not supported"),
            ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "rope scaling 'yarn'"),
            ({"llama.expert_count": 8}, "mixture-of-experts"),
            ({"llama.attention.value_length": 8}, "values of width 8"),
            ({"llama.attention.sliding_window": 128}, "sliding-window attention over 128 of 512"),
            ({"llama.attention.clamp_kqv": 8.0}, "'llama.attention.clamp_kqv' is not supported"),
        ],
    )  # fmt: skip
    def test_unsupported_models(self, tmp_path: Path, changes: dict[str, object], message: str) -> None:
        model = replace(TINY, metadata={**(TINY.metadata or {}), **changes})
        with pytest.raises(UnsupportedModelError, match=message):
            load_model(write_random_gguf(tmp_path / "m.gguf", model))

    def test_rope_scaling(self, tmp_path: Path) -> None:
        def factor(**changes: object) -> float:
            metadata = {f"llama.rope.{key.replace('__', '.')}": value for key, value in changes.items()}
            path = write_random_gguf(tmp_path / "m.gguf", replace(TINY, metadata=metadata))
            return load_model(path).config.rope_factor

        assert factor() == 1.0
        assert factor(scaling__type="linear", scaling__factor=4.0) == 4.0
        assert factor(scaling__factor=2.0) == 2.0
        assert factor(scale_linear=8.0) == 8.0
        assert factor(scaling__type="none", scaling__factor=4.0) == 1.0

    def test_a_tensor_that_the_program_does_not_read_is_refused(self, tmp_path: Path) -> None:
        file = GgufFile.open(write_random_gguf(tmp_path / "m.gguf", TINY))
        sources = [TensorSource(t.name, t.type, t.shape, lambda t=t: [dequantize(t)]) for t in file.tensors.values()]
        extra = TensorSource("blk.0.attn_q_norm.weight", TensorType.F32, (16,), lambda: [np.ones(16, np.float32)])
        with pytest.raises(UnsupportedModelError, match="'blk.0.attn_q_norm.weight' is not part"):
            load_model(write_gguf(tmp_path / "extra.gguf", file.metadata, [*sources, extra]))
        with pytest.raises(ModelFileError, match="tensor blk.0.ffn_up.weight is missing"):
            kept = [source for source in sources if source.name != "blk.0.ffn_up.weight"]
            load_model(write_gguf(tmp_path / "less.gguf", file.metadata, kept))


class TestFuzz:
    """A damaged file loads or raises ModelFileError: no other exception, and no more memory than the file suggests."""

    MAX_BYTES = 2 << 20  # the whole file is under 20 KB; interpreter objects for its header are a few times that

    @pytest.fixture
    def attempt(self, tmp_path: Path) -> Callable[[bytes], bool]:
        path = tmp_path / "fuzzed.gguf"

        def attempt(data: bytes) -> bool:
            path.write_bytes(data)
            tracemalloc.start()
            try:
                load_model(path)
                return True
            except ModelFileError as error:
                assert "\n" not in str(error)
                return False
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < self.MAX_BYTES

        return attempt

    def test_truncated_anywhere(self, tiny_path: Path, attempt: Callable[[bytes], bool]) -> None:
        data = tiny_path.read_bytes()
        header_size = data.rindex(b"output_norm.weight") + 64
        for size in [*range(header_size), *range(header_size, len(data) - ALIGNMENT, 997)]:
            assert not attempt(data[:size]), f"loaded from the first {size} of {len(data)} bytes"
        assert attempt(data)

    def test_flipped_bytes(self, tiny_path: Path, attempt: Callable[[bytes], bool]) -> None:
        data = tiny_path.read_bytes()
        header_size = data.rindex(b"output_norm.weight") + 64
        rng = np.random.default_rng(20)
        outcomes = set()
        for _ in range(2000):
            damaged = bytearray(data)
            for position in rng.integers(0, header_size, rng.integers(1, 4)):
                damaged[position] ^= int(rng.integers(1, 256))
            outcomes.add(attempt(bytes(damaged)))
        assert outcomes == {True, False}

    def test_extreme_integers(self, tiny_path: Path, attempt: Callable[[bytes], bool]) -> None:
        data = tiny_path.read_bytes()
        header_size = data.rindex(b"output_norm.weight") + 64
        rng = np.random.default_rng(21)
        extremes = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
        for _ in range(1000):
            damaged = bytearray(data)
            position, width = int(rng.integers(4, header_size - 8)), int(rng.choice([4, 8]))
            value = extremes[rng.integers(len(extremes))] % 2 ** (8 * width)
            damaged[position : position + width] = value.to_bytes(width, "little")
            attempt(bytes(damaged))
