"""Writing GGUF files: random models of any shape, and requantised copies of a real one. For tests and benchmarks.

Tensors are quantised and written a chunk of rows at a time, so a file larger than memory can be made.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ropeway.model.gguf import GgufFile
from ropeway.model.weights import TensorType, dequantize

ALIGNMENT = 32
CHUNK_VALUES = 1 << 22

TYPE_IDS = {
    TensorType.F32: 0,
    TensorType.F16: 1,
    TensorType.Q4_0: 2,
    TensorType.Q4_1: 3,
    TensorType.Q8_0: 8,
    TensorType.BF16: 30,
}


def quantize(values: np.ndarray, tensor_type: TensorType) -> np.ndarray:
    """float32 values[..., K] -> their stored bytes, uint8, row after row; K is a whole number of blocks."""
    values = np.ascontiguousarray(values, np.float32)
    if values.shape[-1] % tensor_type.block_size:
        raise ValueError(f"rows of {values.shape[-1]} are not whole {tensor_type} blocks")
    return _ENCODERS[tensor_type](values).reshape(-1).view(np.uint8)


def _encode_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # to nearest, ties to even


def _encode_q8_0(values: np.ndarray) -> np.ndarray:
    rows = values.reshape(-1, 32)
    scale = (np.abs(rows).max(axis=1) / 127).astype("<f2")
    blocks = np.empty(len(rows), [("scale", "<f2"), ("codes", "i1", (32,))])
    blocks["scale"] = scale
    blocks["codes"] = np.clip(np.rint(rows * _inverse(scale)), -127, 127)
    return blocks


def _encode_q4_0(values: np.ndarray) -> np.ndarray:
    rows = values.reshape(-1, 32)
    extreme = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)[:, 0]
    scale = (extreme / -8).astype("<f2")
    blocks = np.empty(len(rows), [("scale", "<f2"), ("codes", "u1", (16,))])
    blocks["scale"] = scale
    blocks["codes"] = _pack_nibbles(np.clip(np.rint(rows * _inverse(scale)) + 8, 0, 15))
    return blocks


def _encode_q4_1(values: np.ndarray) -> np.ndarray:
    rows = values.reshape(-1, 32)
    minimum = rows.min(axis=1)
    scale = ((rows.max(axis=1) - minimum) / 15).astype("<f2")
    blocks = np.empty(len(rows), [("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", (16,))])
    blocks["scale"], blocks["minimum"] = scale, minimum
    stored_minimum = blocks["minimum"].astype(np.float32)[:, None]
    blocks["codes"] = _pack_nibbles(np.clip(np.rint((rows - stored_minimum) * _inverse(scale)), 0, 15))
    return blocks


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale as a column, 0 where scale is 0."""
    wide = scale.astype(np.float32)[:, None]
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    codes = codes.astype(np.uint8)
    return codes[:, :16] | codes[:, 16:] << 4


_ENCODERS: dict[TensorType, Callable[[np.ndarray], np.ndarray]] = {
    TensorType.F32: lambda values: values.astype("<f4"),
    TensorType.F16: lambda values: values.astype("<f2"),
    TensorType.BF16: _encode_bf16,
    TensorType.Q8_0: _encode_q8_0,
    TensorType.Q4_0: _encode_q4_0,
    TensorType.Q4_1: _encode_q4_1,
}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to be written: `chunks` yields its float32 rows in order, any number of rows at a time."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[np.ndarray]]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) // self.type.block_size * self.type.block_bytes


def write_gguf(
    path: Path, metadata: Mapping[str, object], tensors: Iterable[TensorSource], *, version: int = 3
) -> Path:
    """Writes a GGUF file. metadata: bool, int, float, str, list of str, or ndarray. Returns `path`."""
    tensors = list(tensors)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    assert isinstance(alignment, int)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _typed(value))
        offset = 0
        for tensor in tensors:
            dimensions = tensor.shape[::-1]
            file.write(_string(tensor.name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions))
            file.write(struct.pack("<IQ", TYPE_IDS[tensor.type], offset))
            offset += -(-tensor.num_bytes // alignment) * alignment
        for tensor in tensors:
            file.write(b"\0" * (-file.tell() % alignment))
            start = file.tell()
            for chunk in tensor.chunks():
                file.write(quantize(chunk, tensor.type))
            if file.tell() - start != tensor.num_bytes:
                raise ValueError(f"{tensor.name} wrote {file.tell() - start} bytes, not {tensor.num_bytes}")
        file.write(b"\0" * (-file.tell() % alignment))
    return path


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


_NUMBER_IDS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


def _typed(value: object) -> bytes:
    """The type and value of a metadata entry; a Python int is u32 where it fits, a float is f32."""
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int() if 0 <= value < 2**32:
            return struct.pack("<II", 4, value)
        case int():
            return struct.pack("<Iq", 11, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case np.ndarray():
            type_id = _NUMBER_IDS[value.dtype.str[1:]]
            return struct.pack("<IIQ", 9, type_id, value.size) + value.tobytes()
    raise TypeError(f"cannot write {type(value).__name__} as metadata")


def requantize_gguf(source: Path, path: Path, tensor_type: TensorType) -> Path:
    """Writes `source` again with every matrix stored as tensor_type; vectors keep their type. Returns `path`."""
    file = GgufFile.open(source)

    def requantized(name: str) -> TensorSource:
        tensor = file.tensors[name]
        new_type = tensor_type if len(tensor.shape) > 1 else tensor.type
        return TensorSource(name, new_type, tensor.shape, lambda: [dequantize(tensor)])

    return write_gguf(path, file.metadata, map(requantized, file.tensors))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """The shape of a random Llama-shaped model; the defaults are tiny and make a file that a server can load.

    weight_type: of every matrix; head_type: of the embedding and head, where it differs.
    has_bias: attention and feed-forward linears have biases. has_rope_factors: Llama 3's rope_freqs.weight.
    metadata: added to what the shape implies, or in its place; None removes a key.
    """

    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 96
    vocab_size: int = 320
    context_length: int = 512
    rope_base: float = 10000.0
    rotary_dim: int | None = None
    weight_type: TensorType = TensorType.F32
    head_type: TensorType | None = None
    is_tied: bool = True
    has_bias: bool = False
    has_rope_factors: bool = False
    seed: int = 0
    metadata: Mapping[str, object] | None = None


# 5 query heads per KV head, heads wider than hidden / heads, rope over part of a head, a vocabulary of no round size,
# an untied head. Every input width is a multiple of 32, so that it can be stored in any type.
ODD_MODEL = RandomModel(
    num_layers=3,
    hidden_size=160,
    num_heads=10,
    num_kv_heads=2,
    head_dim=48,
    intermediate_size=224,
    vocab_size=1003,
    rotary_dim=32,
    weight_type=TensorType.F16,
    is_tied=False,
    has_bias=True,
    has_rope_factors=True,
    seed=7,
)

# The shape of a 1.2-billion-parameter Llama, for measuring where weights do not fit a cache.
LLAMA_1B_MODEL = RandomModel(
    num_layers=16,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=8192,
    vocab_size=128256,
    context_length=8192,
    rope_base=500000.0,
    weight_type=TensorType.Q4_0,
)


def write_random_gguf(path: Path, model: RandomModel) -> Path:
    """Writes a model of random weights; activations stay of order one. The same model gives the same bytes."""
    metadata = {**_hyperparameters(model), **_vocabulary(model.vocab_size), **(model.metadata or {})}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(path, metadata, _random_tensors(model))


def _hyperparameters(model: RandomModel) -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "general.name": "random",
        "llama.block_count": model.num_layers,
        "llama.context_length": model.context_length,
        "llama.embedding_length": model.hidden_size,
        "llama.feed_forward_length": model.intermediate_size,
        "llama.attention.head_count": model.num_heads,
        "llama.attention.head_count_kv": model.num_kv_heads,
        "llama.attention.key_length": model.head_dim,
        "llama.attention.value_length": model.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": model.rotary_dim or model.head_dim,
        "llama.rope.freq_base": model.rope_base,
        "llama.vocab_size": model.vocab_size,
    }


def _vocabulary(vocab_size: int) -> dict[str, object]:
    """A byte-level BPE vocabulary: three control tokens, the 256 bytes, a few merges, and fillers up to vocab_size.

    A vocabulary too small for that gets no tokenizer: such a model takes token ids only.
    """
    merges = ["Ġ t", "h e", "Ġt he", "i n", "a n", "an d"]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = control + list(_byte_characters()) + [merge.replace(" ", "") for merge in merges]
    if vocab_size < len(tokens):
        return {}
    num_fillers = vocab_size - len(tokens)
    types = [3] * len(control) + [1] * (len(tokens) - len(control)) + [5] * num_fillers
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + [f"<|unused_{i}|>" for i in range(num_fillers)],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }


def _byte_characters() -> Iterator[str]:
    """GPT-2's printable stand-in for each of the 256 bytes, in order: itself, or the next character from U+0100."""
    next_code = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte:
            yield chr(byte)
        else:
            yield chr(next_code)
            next_code += 1


def _random_tensors(model: RandomModel) -> Iterator[TensorSource]:
    hidden, width = model.hidden_size, model.intermediate_size
    q_width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    head_type = model.head_type or model.weight_type
    embedding = _random_matrix(model, "token_embd", (model.vocab_size, hidden))
    yield replace(embedding, type=head_type)
    for layer in range(model.num_layers):
        block = f"blk.{layer}"
        yield _random_vector(model, f"{block}.attn_norm.weight", hidden, mean=1.0)
        yield from _random_linear(model, f"{block}.attn_q", (q_width, hidden))
        yield from _random_linear(model, f"{block}.attn_k", (kv_width, hidden))
        yield from _random_linear(model, f"{block}.attn_v", (kv_width, hidden))
        yield from _random_linear(model, f"{block}.attn_output", (hidden, q_width))
        yield _random_vector(model, f"{block}.ffn_norm.weight", hidden, mean=1.0)
        yield from _random_linear(model, f"{block}.ffn_gate", (width, hidden))
        yield from _random_linear(model, f"{block}.ffn_up", (width, hidden))
        yield from _random_linear(model, f"{block}.ffn_down", (hidden, width))
    yield _random_vector(model, "output_norm.weight", hidden, mean=1.0)
    if not model.is_tied:
        yield replace(_random_matrix(model, "output", (model.vocab_size, hidden)), type=head_type)
    if model.has_rope_factors:
        num_pairs = (model.rotary_dim or model.head_dim) // 2
        factors = np.linspace(1, 8, num_pairs, dtype=np.float32)
        yield TensorSource("rope_freqs.weight", TensorType.F32, (num_pairs,), lambda: [factors])


def _random_linear(model: RandomModel, name: str, shape: tuple[int, int]) -> Iterator[TensorSource]:
    yield _random_matrix(model, name, shape)
    if model.has_bias:
        yield _random_vector(model, f"{name}.bias", shape[0], mean=0.0)


def _random_matrix(model: RandomModel, name: str, shape: tuple[int, int]) -> TensorSource:
    def chunks() -> Iterator[np.ndarray]:
        rng = np.random.default_rng([model.seed, *name.encode()])
        rows_at_once = max(1, CHUNK_VALUES // shape[1])
        for start in range(0, shape[0], rows_at_once):
            num_rows = min(rows_at_once, shape[0] - start)
            yield rng.standard_normal((num_rows, shape[1]), np.float32) / np.float32(shape[1] ** 0.5)

    return TensorSource(f"{name}.weight", model.weight_type, shape, chunks)


def _random_vector(model: RandomModel, name: str, size: int, *, mean: float) -> TensorSource:
    def chunks() -> Iterator[np.ndarray]:
        rng = np.random.default_rng([model.seed, *name.encode()])
        yield (mean + 0.1 * rng.standard_normal(size)).astype(np.float32)

    return TensorSource(name, TensorType.F32, (size,), chunks)
