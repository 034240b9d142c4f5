"""Tensors as a model file stores them, and their values as float32. Knows block formats; knows no file and no model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Uint8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]


class TensorType(StrEnum):
    """How the numbers of a tensor are stored, by GGUF's names.

    The quantised types hold blocks of 32 inputs of one row:
    Q8_0: scale f16, 32 codes int8; value = scale * code.
    Q4_0: scale f16, 32 codes of 4 bits; value = scale * (code - 8).
    Q4_1: scale f16, minimum f16, 32 codes of 4 bits; value = scale * code + minimum.
    Byte j of a 4-bit block holds code j in its low half and code j + 16 in its high half.
    """

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"

    @property
    def block_size(self) -> int:
        """Values in one block; a row is a whole number of blocks."""
        return _LAYOUTS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return _LAYOUTS[self][1]


_LAYOUTS: dict[TensorType, tuple[int, int]] = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q8_0: (32, 34),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One stored tensor. shape: row-major, (outputs, inputs) for a matrix. data: its bytes, 1-D, a view of the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    data: Uint8Array

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


def dequantize(tensor: Tensor) -> Float32Array:
    """The values of tensor: a new float32 array of its shape, exact but for the rounding of scale * code + minimum."""
    return _DECODERS[tensor.type](tensor.data).reshape(tensor.shape)


def _decode_f32(data: Uint8Array) -> Float32Array:
    return data.view("<f4").astype(np.float32)


def _decode_f16(data: Uint8Array) -> Float32Array:
    return data.view("<f2").astype(np.float32)


def _decode_bf16(data: Uint8Array) -> Float32Array:
    return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _decode_q8_0(data: Uint8Array) -> Float32Array:
    blocks = data.view(np.dtype([("scale", "<f2"), ("codes", "i1", (32,))]))
    values: Float32Array = blocks["codes"].astype(np.float32)
    values *= blocks["scale"].astype(np.float32)[:, None]
    return values


def _decode_q4_0(data: Uint8Array) -> Float32Array:
    blocks = data.view(np.dtype([("scale", "<f2"), ("codes", "u1", (16,))]))
    values = _unpack_nibbles(blocks["codes"])
    values -= 8.0
    values *= blocks["scale"].astype(np.float32)[:, None]
    return values


def _decode_q4_1(data: Uint8Array) -> Float32Array:
    blocks = data.view(np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", (16,))]))
    values = _unpack_nibbles(blocks["codes"])
    values *= blocks["scale"].astype(np.float32)[:, None]
    values += blocks["minimum"].astype(np.float32)[:, None]
    return values


def _unpack_nibbles(codes: Uint8Array) -> Float32Array:
    """codes[B, 16] bytes -> values[B, 32] in the order of the block's inputs."""
    values = np.empty((len(codes), 32), np.float32)
    values[:, :16] = codes & 0x0F
    values[:, 16:] = codes >> 4
    return values


_DECODERS: dict[TensorType, Callable[[Uint8Array], Float32Array]] = {
    TensorType.F32: _decode_f32,
    TensorType.F16: _decode_f16,
    TensorType.BF16: _decode_bf16,
    TensorType.Q8_0: _decode_q8_0,
    TensorType.Q4_0: _decode_q4_0,
    TensorType.Q4_1: _decode_q4_1,
}
