"""The sampling that a model's makers advise, as a GGUF file carries it from their generation config."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ropeway.errors import ModelFileError

# Metadata key -> the field of SamplingParams, and the values that it may hold there.
_KEYS: dict[str, tuple[str, type[int] | type[float], float, float]] = {
    "general.sampling.temp": ("temperature", float, 0.0, 100.0),
    "general.sampling.top_k": ("top_k", int, 0, 2**31 - 1),
    "general.sampling.top_p": ("top_p", float, 0.0, 1.0),
    "general.sampling.min_p": ("min_p", float, 0.0, 1.0),
    "general.sampling.penalty_repeat": ("repetition_penalty", float, 0.0, 100.0),
}


def sampling_defaults(metadata: Mapping[str, object]) -> dict[str, float]:
    """Fields of SamplingParams -> what the file advises; empty where it advises nothing.

    Raises ModelFileError for a value of the wrong type or out of range.
    """
    found: dict[str, float] = {}
    for key, (name, kind, low, high) in _KEYS.items():
        if key not in metadata:
            continue
        value = metadata[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelFileError(f"{key} must be a number, not {value!r}")
        if not low <= value <= high or (name in ("top_p", "repetition_penalty") and value == 0):
            raise ModelFileError(f"{key} is {value}, outside {low} to {high}; remove it from the file or correct it")
        found[name] = kind(value)
    return found
