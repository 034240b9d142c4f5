"""Sampling parameters: what is accepted, and that what is not is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ropeway.core.params import SamplingParams
from ropeway.errors import InvalidRequestError


def test_the_defaults_are_valid() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature, params.is_greedy) == (1, 16, 1.0, False)
    assert SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 128},
        {"max_tokens": None, "min_tokens": 10**6},
        {"max_tokens": 5, "min_tokens": 5},
        {"top_k": 2**31 - 1, "top_p": 1, "min_p": 1},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"repetition_penalty": 1e-3, "presence_penalty": -2, "frequency_penalty": 2.0},
        {"logit_bias": {3: -100, 4: 1.5}},
        {"logit_bias": {}},
        {"stop_token_ids": range(3), "ignore_eos": True},
    ],
)
def test_the_edges_of_each_range_are_accepted(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, "n must be from 1 to 128, not 0"),
        ("n", 129, "n must be from 1 to 128, not 129"),
        ("n", 1.5, "n must be an integer, not 1.5"),
        ("n", True, "n must be an integer, not True"),
        ("max_tokens", -1, "max_tokens must be from 0 to 2147483647, not -1"),
        ("logprobs", 21, "logprobs must be from 0 to 20, not 21"),
        ("prompt_logprobs", -1, "prompt_logprobs must be from 0 to 20, not -1"),
        ("bad_words", [""], "bad_words must hold non-empty strings, not ''"),
        ("bad_words", ["x"] * 257, "bad_words holds 257 texts of 257 characters in all; at most 256 texts of 8192"),
        ("stop", "x" * 8193, "stop holds 1 texts of 8193 characters in all; at most 256 texts of 8192 characters"),
        ("skip_special_tokens", None, "skip_special_tokens must be true or false, not None"),
        ("max_tokens", "16", "max_tokens must be an integer, not '16'"),
        ("min_tokens", 17, "min_tokens must be from 0 to 16, not 17"),
        ("temperature", math.nan, "temperature must be a finite number, not nan"),
        ("temperature", -0.1, "temperature must be from 0 to 100, not -0.1"),
        ("temperature", None, "temperature must be a finite number, not None"),
        ("temperature", 10**400, r"temperature must be a finite number, not 10{59}\.\.\.$"),
        ("temperature", 10**9000, "temperature must be a finite number, not an integer of 29898 bits"),
        ("seed", 10**9000, "seed must be from .*, not an integer of 29898 bits"),
        ("ignore_eos", "x" * 999, r"ignore_eos must be true or false, not 'x{59}\.\.\.$"),
        ("top_k", -1, "top_k must be from 0 to 2147483647, not -1"),
        ("top_k", 2**31, "top_k must be from 0 to 2147483647"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1, not 0"),
        ("top_p", 1e-320, "top_p is 9.99989e-321; above 0 it must be at least 1e-09"),
        ("temperature", 1e-40, "temperature is 1e-40; above 0 it must be at least 1e-09"),
        ("repetition_penalty", 1e-40, "repetition_penalty is 1e-40; above 0 it must be at least 1e-09"),
        ("top_p", 1.1, "top_p must be above 0 and at most 1, not 1.1"),
        ("min_p", math.inf, "min_p must be a finite number, not inf"),
        ("seed", 2**64, "seed must be from"),
        ("seed", -(2**63) - 1, "seed must be from"),
        ("repetition_penalty", 0.0, "repetition_penalty must be above 0"),
        ("presence_penalty", 2.1, "presence_penalty must be from -2 to 2, not 2.1"),
        ("frequency_penalty", False, "frequency_penalty must be a finite number, not False"),
        ("logit_bias", [1], r"logit_bias must map token ids to numbers, not \[1\]"),
        ("logit_bias", {"3": 1.0}, "logit_bias must be an integer, not '3'"),
        ("logit_bias", {-1: 1.0}, "logit_bias must be from 0 to 2147483647, not -1"),
        ("logit_bias", {3: 101}, "logit_bias must be from -100 to 100, not 101"),
        ("stop", 5, "stop must be a list, not 5"),
        ("stop", ["a", ""], "stop must hold non-empty strings, not ''"),
        ("stop", "", "stop must hold non-empty strings, not ''"),
        ("stop", [1], "stop must hold non-empty strings, not 1"),
        ("stop_token_ids", 5, "stop_token_ids must be a list, not 5"),
        ("stop_token_ids", ["a"], "stop_token_ids must be an integer, not 'a'"),
        ("stop_token_ids", [-1], "stop_token_ids must be from 0 to 2147483647, not -1"),
        ("ignore_eos", 1, "ignore_eos must be true or false, not 1"),
    ],
    ids=lambda value: str(value)[:40] if not isinstance(value, int) else "integer",
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.param == name


def test_lists_are_kept_as_immutable_copies() -> None:
    stop, stop_token_ids, logit_bias = ["a", "b"], [1, 2], {3: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids, logit_bias=logit_bias)
    stop.append("c")
    stop_token_ids.append(3)
    logit_bias[4] = 1.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a", "b"), (1, 2), {3: 1.0})
    assert SamplingParams(stop="ab").stop == ("ab",)
