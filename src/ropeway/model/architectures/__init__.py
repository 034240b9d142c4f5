"""The architectures: each a function from a model's configuration to its Program. One file per family."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

from ropeway.errors import UnsupportedModelError
from ropeway.model.architectures.llama import llama
from ropeway.model.config import ModelConfig
from ropeway.model.program import Program

Architecture = Callable[[ModelConfig, AbstractSet[str]], Program]

ARCHITECTURES: Final[dict[str, Architecture]] = {"llama": llama}


def build_program(config: ModelConfig, tensor_names: AbstractSet[str]) -> Program:
    """The Program of the model; tensor_names decide what a family leaves optional (biases, an untied head).

    Raises UnsupportedModelError for an architecture that Ropeway does not have, ModelFileError where layers are
    missing.
    """
    check_architecture(config.architecture)
    return ARCHITECTURES[config.architecture](config, tensor_names)


def check_architecture(name: object) -> None:
    """Raises UnsupportedModelError unless `name` is an architecture that Ropeway has."""
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {str(name)[:40]!r} is not supported; use a model of: {', '.join(sorted(ARCHITECTURES))}"
        )
