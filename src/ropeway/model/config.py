"""A model's hyperparameters, read from GGUF metadata and checked. Knows no tensors and no arithmetic.

A key of the architecture's own that is neither read here nor known to be inert is refused by name: it could change the
answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from ropeway.errors import ModelFileError, UnsupportedModelError

_MAX_INT32: Final = 2**31 - 1

# Keys under "<architecture>." that are read, and those that describe a model without changing what it computes.
_READ: Final = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "expert_count",
        "expert_used_count",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
    }
)
_INERT: Final = frozenset(
    {"tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length", "attention.causal"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What an architecture needs to write its Program. Every number is positive and checked against the others.

    rotary_dim: entries of a head that rope turns. rope_factor: positions are divided by it (linear scaling; 1 is none).
    context_length: positions the model was trained for.
    """

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rotary_dim: int
    rope_base: float
    rope_factor: float

    @staticmethod
    def from_metadata(metadata: Mapping[str, object]) -> ModelConfig:
        """Reads the hyperparameters of the architecture that `metadata` names.

        Raises ModelFileError for a key that is missing, of the wrong type or out of range, and UnsupportedModelError
        for a hyperparameter that Ropeway does not have.
        """
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelFileError("metadata key general.architecture is missing; fetch a complete model file")
        keys = _Keys(metadata, architecture)
        keys.check_known()
        num_heads = keys.integer("attention.head_count")
        num_kv_heads = keys.integer("attention.head_count_kv", num_heads)
        if num_heads % num_kv_heads:
            raise ModelFileError(
                f"{num_heads} attention heads do not divide among {num_kv_heads} KV heads; fetch the model again"
            )
        hidden_size = keys.integer("embedding_length")
        head_dim = _head_dim(keys, hidden_size, num_heads)
        context_length = keys.integer("context_length")
        _refuse_unsupported(keys, context_length)
        name = metadata.get("general.name", architecture)
        return ModelConfig(
            architecture=architecture,
            name=name if isinstance(name, str) else architecture,
            num_layers=keys.integer("block_count"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=keys.integer("feed_forward_length"),
            vocab_size=_vocab_size(keys, metadata),
            context_length=context_length,
            norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rotary_dim=_rotary_dim(keys, head_dim),
            rope_base=keys.number("rope.freq_base", 10000.0),
            rope_factor=_rope_factor(keys),
        )


class _Keys:
    """Typed reading of the keys under one prefix."""

    def __init__(self, metadata: Mapping[str, object], prefix: str) -> None:
        self._metadata = metadata
        self._prefix = prefix + "."

    def check_known(self) -> None:
        for key in self._metadata:
            if key.startswith(self._prefix) and key[len(self._prefix) :] not in _READ | _INERT:
                raise UnsupportedModelError(
                    f"metadata key {key[:80]!r} is not supported and could change the answers; use another model"
                )

    def has(self, key: str) -> bool:
        return self._prefix + key in self._metadata

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MAX_INT32:
            self._fail(key, f"an integer from {low} to {_MAX_INT32}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self._fail(key, "a positive finite number", value)
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self._fail(key, "a string", value)
        return value

    def _get(self, key: str, default: object) -> object:
        value = self._metadata.get(self._prefix + key, default)
        if value is None:
            raise ModelFileError(f"metadata key {self._prefix + key} is missing; fetch a complete model file")
        return value

    def _fail(self, key: str, wanted: str, value: object) -> NoReturn:
        raise ModelFileError(
            f"metadata key {self._prefix + key} must be {wanted}, not {repr(value)[:40]}; fetch the model again"
        )


def _head_dim(keys: _Keys, hidden_size: int, num_heads: int) -> int:
    if keys.has("attention.key_length"):
        head_dim = keys.integer("attention.key_length")
    elif hidden_size % num_heads:
        raise ModelFileError(f"width {hidden_size} does not divide among {num_heads} heads; fetch the model again")
    else:
        head_dim = hidden_size // num_heads
    value_dim = keys.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"values of width {value_dim} with keys of width {head_dim} are not supported; use a model where they agree"
        )
    return head_dim


def _rotary_dim(keys: _Keys, head_dim: int) -> int:
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ModelFileError(
            f"rope over {rotary_dim} entries of heads of {head_dim} must be even and fit; fetch the model again"
        )
    return rotary_dim


def _rope_factor(keys: _Keys) -> float:
    """Linear scaling divides positions by a factor (Chen et al. 2023); a factor without a type is one."""
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling == "none":
        return 1.0
    if scaling != "linear":
        raise UnsupportedModelError(
            f"rope scaling {scaling[:40]!r} is not supported; use a model with 'linear' or 'none'"
        )
    if keys.has("rope.scaling.type") and not (keys.has("rope.scaling.factor") or keys.has("rope.scale_linear")):
        raise ModelFileError("rope scaling is 'linear' but rope.scaling.factor is missing; fetch a complete model file")
    return keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))


def _vocab_size(keys: _Keys, metadata: Mapping[str, object]) -> int:
    """The declared size, or else the number of tokens in the file's vocabulary."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise ModelFileError("metadata key tokenizer.ggml.tokens must be an array of strings; fetch the model again")
    vocab_size = keys.integer("vocab_size", len(tokens))
    if vocab_size < len(tokens):
        raise ModelFileError(
            f"vocab_size is {vocab_size}, but the vocabulary has {len(tokens)} tokens; fetch the model again"
        )
    return vocab_size


def _refuse_unsupported(keys: _Keys, context_length: int) -> None:
    if keys.integer("expert_count", 0, low=0):
        raise UnsupportedModelError("mixture-of-experts layers are not supported; use a dense model")
    window = keys.integer("attention.sliding_window", context_length, low=0)
    if 0 < window < context_length:
        raise UnsupportedModelError(
            f"sliding-window attention over {window} of {context_length} positions is not supported; use another model"
        )
