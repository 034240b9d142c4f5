"""Numbers, texts and digests as bytes, for the decision log. Knows no records.

Numbers are LEB128 (seven bits a byte, the lowest first), signed ones in zigzag (0, -1, 1, -2 become 0, 1, 2, 3).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

DIGEST_BYTES = 8

_DOUBLE = struct.Struct("<d")


class OutOfDataError(Exception):
    """A read beyond the end."""


class ByteWriter:
    """Collects the body of a record."""

    def __init__(self) -> None:
        self.data = bytearray()

    def uint(self, value: int) -> None:
        data = self.data
        while value > 0x7F:
            data.append(value & 0x7F | 0x80)
            value >>= 7
        data.append(value)

    def sint(self, value: int) -> None:
        self.uint(value << 1 if value >= 0 else -value * 2 - 1)

    def uints(self, values: Sequence[int]) -> None:
        self.uint(len(values))
        for value in values:
            self.uint(value)

    def double(self, value: float) -> None:
        self.data += _DOUBLE.pack(value)

    def maybe_double(self, value: float | None) -> None:
        self.uint(value is not None)
        if value is not None:
            self.double(value)

    def text(self, value: str) -> None:
        encoded = value.encode()
        self.uint(len(encoded))
        self.data += encoded

    def digests(self, digests: Sequence[bytes]) -> None:
        self.uint(len(digests))
        for digest in digests:
            assert len(digest) == DIGEST_BYTES, f"a digest of {len(digest)} bytes"
            self.data += digest


class ByteReader:
    """Reads data[position:end]. Raises OutOfDataError beyond it."""

    def __init__(self, data: bytes, position: int, end: int) -> None:
        self._data = data
        self._end = end
        self.position = position

    def uint(self) -> int:
        value = shift = 0
        while True:
            if self.position >= self._end:
                raise OutOfDataError
            byte = self._data[self.position]
            self.position += 1
            value |= (byte & 0x7F) << shift
            if byte <= 0x7F:
                return value
            shift += 7

    def sint(self) -> int:
        value = self.uint()
        return -(value + 1 >> 1) if value & 1 else value >> 1

    def uints(self) -> tuple[int, ...]:
        return tuple([self.uint() for _ in range(self.uint())])

    def double(self) -> float:
        return float(_DOUBLE.unpack(self.take(8))[0])

    def maybe_double(self) -> float | None:
        return self.double() if self.uint() else None

    def text(self) -> str:
        return self.take(self.uint()).decode()

    def digests(self) -> tuple[bytes, ...]:
        return tuple([self.take(DIGEST_BYTES) for _ in range(self.uint())])

    def take(self, num_bytes: int) -> bytes:
        start = self.position
        if start + num_bytes > self._end:
            raise OutOfDataError
        self.position += num_bytes
        return self._data[start : start + num_bytes]


def framed(body: ByteWriter) -> bytes:
    """The length of a body, and the body."""
    length = ByteWriter()
    length.uint(len(body.data))
    return bytes(length.data + body.data)
