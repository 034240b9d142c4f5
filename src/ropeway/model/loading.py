"""From a model file to a `Model`: opens it, checks that it holds exactly what its Program reads. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ropeway.errors import ModelFileError, UnsupportedModelError
from ropeway.model.architectures import build_program, check_architecture
from ropeway.model.config import ModelConfig
from ropeway.model.gguf import GgufFile
from ropeway.model.program import Program
from ropeway.model.weights import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model file, understood. tensors: exactly the Program's weights, by name, still in the file.
    metadata: the whole file's, for the tokenizer and the chat template."""

    config: ModelConfig
    program: Program
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, object]


def load_model(path: str | Path) -> Model:
    """Opens the GGUF file at `path`; reads no weights yet.

    Raises ModelFileError (unreadable, corrupt, incomplete) and UnsupportedModelError (something Ropeway does not have).
    """
    file = GgufFile.open(path)
    try:
        check_architecture(file.metadata.get("general.architecture"))
        config = ModelConfig.from_metadata(file.metadata)
        program = build_program(config, file.tensors.keys())
        _check_tensors(program, file.tensors)
    except ModelFileError as error:
        raise type(error)(f"{file.path}: {error}") from None
    return Model(config, program, file.tensors, file.metadata)


def _check_tensors(program: Program, tensors: Mapping[str, Tensor]) -> None:
    """The file's tensors and the Program's weights are the same set, of the same shapes."""
    weights = program.weights
    for name, weight in weights.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"tensor {name} is missing; fetch a complete model file")
        if tensor.shape != weight.shape:
            raise ModelFileError(
                f"tensor {name} has shape {tensor.shape}, but the model needs {weight.shape}; fetch the model again"
            )
    for name in tensors:
        if name not in weights:
            raise UnsupportedModelError(
                f"tensor {name[:64]!r} is not part of this architecture, and leaving it out could change the model's "
                "answers; use another model"
            )
