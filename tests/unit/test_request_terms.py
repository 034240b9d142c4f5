"""The terms of a request are checked where it is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ropeway.core.params import SamplingParams, ServiceTerms
from ropeway.errors import InvalidRequestError
from ropeway.inputs import EncodedPrompt, RequestBuilder


def builder(*, has_priorities: bool) -> RequestBuilder:
    tokenizer = cast(Any, SimpleNamespace(eos_token_ids=frozenset({0})))
    return RequestBuilder(tokenizer, cast(Any, None), max_model_len=64, vocab_size=100, has_priorities=has_priorities)


def test_a_priority_that_nothing_looks_at_is_refused_with_the_remedy() -> None:
    prompt, params = EncodedPrompt((1, 2)), SamplingParams()
    with pytest.raises(InvalidRequestError, match="priority is 2.*--scheduling-policy priority") as refusal:
        builder(has_priorities=False).build(prompt, params, "a", ServiceTerms(priority=2))
    assert refusal.value.param == "priority"
    terms = ServiceTerms(priority=2, user="ada")
    assert builder(has_priorities=True).build(prompt, params, "a", terms).terms == terms
    assert builder(has_priorities=False).build(prompt, params, "a", ServiceTerms(user="ada")).terms.user == "ada"
    assert builder(has_priorities=False).build(prompt, params, "a").terms == ServiceTerms()
