"""Reading GGUF files (versions 2 and 3, little-endian) through a memory map. Knows the container, not what it
describes.

Layout, from the GGUF specification of the ggml project: magic, version, tensor count, metadata count; metadata as (key,
type, value); tensor records as (name, dimensions, type, offset); then, aligned, the tensor data. Every count, length
and offset is checked against the bytes that are there before it is used, so a hostile file costs no more memory than
its own size suggests.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from ropeway.errors import ModelFileError, UnsupportedModelError
from ropeway.model.weights import Tensor, TensorType

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_ARRAY_DEPTH: Final = 4
_MAX_DIMENSIONS: Final = 4
_MAX_ALIGNMENT: Final = 1 << 20
_MIN_METADATA_BYTES: Final = 13  # key length, type, a one-byte value
_MIN_TENSOR_BYTES: Final = 32  # name length, one dimension, type, offset

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final[dict[int, np.dtype[np.generic]]] = {
    number: np.dtype(name)
    for number, name in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip

_TENSOR_TYPES: Final = {
    0: TensorType.F32,
    1: TensorType.F16,
    2: TensorType.Q4_0,
    3: TensorType.Q4_1,
    8: TensorType.Q8_0,
    30: TensorType.BF16,
}
# Names of the ids that we do not read, so that a refusal can say what the file holds.
_OTHER_TENSOR_TYPES: Final = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """An opened file. Tensor data stays in the file until it is read; the map lives as long as any tensor does.

    metadata: key -> bool, int, float, str, list (of strings or of lists) or ndarray (of numbers or bools).
    tensors: name -> Tensor, in the file's order.
    """

    path: Path
    version: int
    metadata: dict[str, object]
    tensors: dict[str, Tensor]

    @staticmethod
    def open(path: str | Path) -> GgufFile:
        """Reads the header of the GGUF file at `path` and maps its tensors.

        Raises ModelFileError (unreadable, truncated, corrupt or not GGUF) and UnsupportedModelError (a version or
        tensor type that Ropeway does not read).
        """
        path = Path(path)
        reader = _Reader(path, _map_file(path))
        version = reader.read_version()
        num_tensors = reader.read_u64("the number of tensors")
        num_metadata = reader.read_u64("the number of metadata entries")
        metadata = reader.read_metadata(num_metadata)
        return GgufFile(path, version, metadata, reader.read_tensors(num_tensors, _alignment(reader, metadata)))


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelFileError(f"{path}: the file is empty; fetch the model again") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot read the model file: {error.strerror}; check the path") from error


def _alignment(reader: _Reader, metadata: dict[str, object]) -> int:
    value = metadata.get("general.alignment", 32)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        reader.fail(f"general.alignment must be a power of two up to {_MAX_ALIGNMENT}, not {_show(value)}")
    return value


class _Reader:
    """A position in the mapped bytes. Every read checks that what it wants is there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0

    def fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self._path}: {problem}; the file is truncated or corrupt, fetch the model again")

    def _claim(self, num_bytes: int, what: str) -> int:
        """Moves past num_bytes and returns where they start."""
        start = self._position
        if num_bytes > self._size - start:
            self.fail(f"{what} needs {num_bytes} bytes at offset {start}, but the file has {self._size}")
        self._position = start + num_bytes
        return start

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        remaining = self._size - self._position
        if count * min_bytes > remaining:
            self.fail(f"{what} cannot be {count}: at least {count * min_bytes} bytes, but {remaining} remain")

    def read_version(self) -> int:
        magic = self._data[: len(_MAGIC)]
        if magic != _MAGIC:
            raise ModelFileError(f"{self._path}: not a GGUF file (it starts with {magic!r}); name a .gguf model file")
        self._position = len(_MAGIC)
        version = self._read_u32("the version")
        if version in _VERSIONS:
            return version
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        found = f"version {swapped}, big-endian" if swapped in _VERSIONS else f"version {version}"
        raise UnsupportedModelError(
            f"{self._path}: GGUF {found} is not supported; convert the model to version 2 or 3, little-endian"
        )

    def _read_u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._data, self._claim(4, what))[0]
        return value

    def read_u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._data, self._claim(8, what))[0]
        return value

    def _read_string(self, what: str) -> str:
        length = self.read_u64(f"the length of {what}")
        start = self._claim(length, what)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} at offset {start} is not valid UTF-8")

    def read_metadata(self, count: int) -> dict[str, object]:
        self._check_count(count, _MIN_METADATA_BYTES, "the number of metadata entries")
        metadata: dict[str, object] = {}
        for _ in range(count):
            key = self._read_string("a metadata key")
            if key in metadata:
                self.fail(f"metadata key {_show(key)} appears twice")
            metadata[key] = self._read_value(self._read_u32(f"the type of {_show(key)}"), key)
        return metadata

    def _read_value(self, value_type: int, key: str) -> object:
        if value_type == _STRING:
            return self._read_string(f"the value of {_show(key)}")
        if value_type == _ARRAY:
            return self._read_array(key, 1)
        if value_type == _BOOL:
            return bool(self._read_bools(1, key)[0])
        if value_type in _NUMBERS:
            return self._read_numbers(value_type, 1, key)[0].item()
        self.fail(f"metadata key {_show(key)} has unknown value type {value_type}")

    def _read_array(self, key: str, depth: int) -> object:
        if depth > _MAX_ARRAY_DEPTH:
            self.fail(f"metadata key {_show(key)} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        value_type = self._read_u32(f"the element type of {_show(key)}")
        count = self.read_u64(f"the length of {_show(key)}")
        if value_type == _STRING:
            return self._read_strings(count, key)
        if value_type == _BOOL:
            return self._read_bools(count, key)
        if value_type in _NUMBERS:
            return self._read_numbers(value_type, count, key)
        if value_type == _ARRAY:
            self._check_count(count, 12, f"the length of {_show(key)}")
            return [self._read_array(key, depth + 1) for _ in range(count)]
        self.fail(f"metadata key {_show(key)} has unknown element type {value_type}")

    def _read_numbers(self, value_type: int, count: int, key: str) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        dtype = _NUMBERS[value_type]
        start = self._claim(count * dtype.itemsize, f"the value of {_show(key)}")
        return np.frombuffer(self._data, dtype, count, start)

    def _read_bools(self, count: int, key: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        values = np.frombuffer(self._data, np.uint8, count, self._claim(count, f"the value of {_show(key)}"))
        if values.size and values.max() > 1:
            self.fail(f"metadata key {_show(key)} holds a bool that is neither 0 nor 1")
        return values.view(np.bool_)

    def _read_strings(self, count: int, key: str) -> list[str]:
        """A vocabulary has 10^5 strings: the loop is kept bare, and its ways to fail are told apart afterwards."""
        self._check_count(count, _U64.size, f"the length of {_show(key)}")
        strings: list[str] = []
        data, size, position = self._data, self._size, self._position
        append, unpack = strings.append, _U64.unpack_from
        try:
            for _ in range(count):
                end = position + 8 + unpack(data, position)[0]
                if end > size:
                    self.fail(f"string {len(strings)} of {_show(key)} ends at byte {end}, but the file has {size}")
                append(data[position + 8 : end].decode())
                position = end
        except struct.error:
            self.fail(f"the file ends inside string {len(strings)} of {_show(key)}")
        except UnicodeDecodeError:
            self.fail(f"string {len(strings)} of {_show(key)} is not valid UTF-8")
        self._position = position
        return strings

    def read_tensors(self, count: int, alignment: int) -> dict[str, Tensor]:
        self._check_count(count, _MIN_TENSOR_BYTES, "the number of tensors")
        records: dict[str, tuple[TensorType, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self._read_string("a tensor name")
            if name in records:
                self.fail(f"tensor {_show(name)} appears twice")
            records[name] = self._read_tensor_record(name, alignment)
        data_start = -(-self._position // alignment) * alignment
        tensors = {}
        for name, (tensor_type, shape, offset) in records.items():
            num_bytes = math.prod(shape) // tensor_type.block_size * tensor_type.block_bytes
            start = data_start + offset
            if start + num_bytes > self._size:
                self.fail(f"tensor {_show(name)} ends at byte {start + num_bytes}, but the file has {self._size}")
            tensors[name] = Tensor(name, tensor_type, shape, np.frombuffer(self._data, np.uint8, num_bytes, start))
        self._check_overlaps([(offset, tensors[name]) for name, (_, _, offset) in records.items()])
        return tensors

    def _read_tensor_record(self, name: str, alignment: int) -> tuple[TensorType, tuple[int, ...], int]:
        num_dimensions = self._read_u32(f"the rank of tensor {_show(name)}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self.fail(f"tensor {_show(name)} has {num_dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}")
        # The file lists the fastest-varying dimension first.
        shape = tuple(self.read_u64(f"the shape of tensor {_show(name)}") for _ in range(num_dimensions))[::-1]
        type_id = self._read_u32(f"the type of tensor {_show(name)}")
        offset = self.read_u64(f"the offset of tensor {_show(name)}")
        tensor_type = _TENSOR_TYPES.get(type_id)
        if tensor_type is None:
            raise UnsupportedModelError(
                f"{self._path}: tensor {_show(name)} has type {_OTHER_TENSOR_TYPES.get(type_id, type_id)}, which is "
                f"not supported; use a model file with {', '.join(TensorType)}"
            )
        if 0 in shape or shape[-1] % tensor_type.block_size:
            self.fail(
                f"tensor {_show(name)} has shape {shape}, but rows of {tensor_type} hold whole blocks of "
                f"{tensor_type.block_size}"
            )
        if offset % alignment:
            self.fail(f"tensor {_show(name)} is at offset {offset}, not a multiple of {alignment}")
        return tensor_type, shape, offset

    def _check_overlaps(self, placed: list[tuple[int, Tensor]]) -> None:
        end, last = 0, ""
        for offset, tensor in sorted(placed, key=lambda pair: pair[0]):
            if offset < end:
                self.fail(f"tensors {_show(last)} and {_show(tensor.name)} overlap")
            end, last = offset + tensor.data.nbytes, tensor.name


def _show(value: object) -> str:
    """A value from the file in a message: quoted, on one line, cut short."""
    text = repr(value if not isinstance(value, str) else value[:64])
    return text if len(text) <= 80 else text[:77] + "..."
