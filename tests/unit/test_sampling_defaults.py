"""What a file advises on sampling."""

from __future__ import annotations

import pytest

from ropeway.errors import ModelFileError
from ropeway.model.sampling_defaults import sampling_defaults


def test_what_the_file_carries() -> None:
    assert sampling_defaults({}) == {}
    found = sampling_defaults(
        {
            "general.sampling.temp": 0.6,
            "general.sampling.top_k": 20,
            "general.sampling.top_p": 0.95,
            "general.sampling.min_p": 0,
            "general.sampling.penalty_repeat": 1.05,
            "general.sampling.mirostat": 2,
        }
    )
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05}
    assert type(found["top_k"]) is int and type(found["min_p"]) is float


@pytest.mark.parametrize("value", ["hot", True, float("nan"), -1, 101])
def test_what_makes_no_sense(value: object) -> None:
    with pytest.raises(ModelFileError, match=r"general\.sampling\.temp"):
        sampling_defaults({"general.sampling.temp": value})
    with pytest.raises(ModelFileError, match=r"general\.sampling\.top_p"):
        sampling_defaults({"general.sampling.top_p": 0})
