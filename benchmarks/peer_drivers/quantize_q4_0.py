"""Writes a Q4_0 copy of a GGUF file: what `llama-quantize --allow-requantize … Q4_0` does to the default model.

Runs in llama.cpp's environment with its own `gguf` package, whose quantiser matches the C one bit for bit. The 4-bit
matrices become Q4_0; the embedding stays Q8_0 (its width is no multiple of 256, so llama-quantize leaves it so too);
vectors stay float32.
"""

from __future__ import annotations

import os
import sys

import gguf
from gguf import quants

# Written by the writer itself from the tensors and the architecture.
_DERIVED_FIELDS = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for name, field in reader.fields.items():
        if name in _DERIVED_FIELDS:
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, element)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)


def convert(source: str, target: str) -> None:
    """Reads `source` and writes `target`, which appears only once it is whole."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    partial = f"{target}.part{os.getpid()}"
    writer = gguf.GGUFWriter(partial, architecture)
    copy_metadata(reader, writer)
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        data = tensor.data
        if kind == gguf.GGMLQuantizationType.Q4_1:
            kind = gguf.GGMLQuantizationType.Q4_0
            data = quants.quantize(quants.dequantize(data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, target)


if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2])
