"""The input of a call in Anthropic's messages: whatever JSON a model writes, and an object where it writes none."""

from __future__ import annotations

import json

import orjson
import pytest

from ropeway.server.choices import ChoiceNews
from ropeway.server.messages import ContentBlocks
from ropeway.text.tool_calls import CallDelta


@pytest.mark.parametrize(
    "arguments",
    [
        '{"days": 11}',
        '{"id": 123456789012345678901}',
        '{"half": "\\ud83d"}',
        '{"deep": ' + "[" * 400 + "]" * 400 + "}",
        '{"large": 1e999, "spaced" :[ 1 ]}',
    ],
)
def test_what_is_json_is_kept_as_it_was_written(arguments: str) -> None:
    assert json.loads(arguments) == json.loads(written(arguments))["input"]
    assert arguments.encode() in written(arguments)


@pytest.mark.parametrize("arguments", ["", '{"days": 1', '{"days": NaN}', "[" * 100_000, '{"line": "\n"}'])
def test_what_is_none_is_an_empty_object(arguments: str) -> None:
    assert json.loads(written(arguments))["input"] == {}


def written(arguments: str) -> bytes:
    """The block of a call with these arguments."""
    blocks = ContentBlocks()
    blocks.push(ChoiceNews(0, calls=[CallDelta(0, "pay", arguments)], finish_reason="tool_calls"))
    (block,) = blocks.content()
    return orjson.dumps(block)
