"""What a response keeps once it has ended: it may be stored for an hour, so none of what only its making needs.

And what of it a conversation that goes on from it holds.
"""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from ropeway.core.params import Request, SamplingParams
from ropeway.errors import EngineStoppedError
from ropeway.model.gguf import GgufFile
from ropeway.outputs import Delta
from ropeway.server.choices import ChoiceNews, RequestChoices, Wishes
from ropeway.server.openai import Generation
from ropeway.server.responses import LiveResponse, OutputItems
from ropeway.server.responses_body import ResponsesBody
from ropeway.text.tokenizer import Tokenizer
from ropeway.text.tool_calls import CallDelta


def reachable(root: object) -> set[type]:
    """Types of everything that an object keeps alive."""
    seen: dict[int, object] = {}
    todo = [root]
    while todo:
        found = todo.pop()
        if id(found) not in seen and not isinstance(found, type | FunctionType | ModuleType):
            seen[id(found)] = found
            todo += gc.get_referents(found)
    return {type(each) for each in seen.values()}


class Input(str):
    """A text that can be told from others."""


ENDINGS = {
    "is whole": "incomplete",
    "fails": "failed",
    "meets a bug": "failed",
    "has no reader": "cancelled",
    "ends as its reader leaves": "cancelled",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ended_response_keeps_neither_its_prompt_nor_what_read_its_answer(
    tiny_model_path: Path, ending: str
) -> None:
    request = Request("r", (5, 6), SamplingParams(temperature=0.5, top_p=0.25), 100, seed=9)
    tokenizer = Tokenizer.from_metadata(GgufFile.open(tiny_model_path).metadata)
    generation = Generation("resp_1", "tiny", 7, (request,), False, Wishes(), tokenizer)
    ends: list[dict[str, Any]] = []
    body = ResponsesBody(input=[{"type": "reasoning", "content": [{"text": Input("hm")}]}])
    live = LiveResponse(generation, body, lambda: ends.append(copy.deepcopy(live.object())))
    assert Input in reachable(body)
    live.chunks([Delta("r", 0, "text", (70,), None)])
    assert RequestChoices in reachable(live)
    if ending == "is whole":
        live.chunks([Delta("r", 0, "", (), "length")])
        live.last()
    elif ending == "fails":
        live.failure(EngineStoppedError("the engine is not running"))
    elif ending == "meets a bug":
        with pytest.raises(AttributeError):
            live.chunks([None])  # type: ignore[list-item]
        assert "its log" in live.object()["error"]["message"]
    elif ending == "ends as its reader leaves":
        live.last()
    live.close()
    assert not {RequestChoices, Request, Generation, Tokenizer, Input} & reachable(live)
    shown = live.object()
    assert (shown["id"], shown["model"], shown["created_at"]) == ("resp_1", "tiny", 7)
    assert (shown["temperature"], shown["top_p"], shown["status"]) == (0.5, 0.25, ENDINGS[ending])
    (item,) = shown["output"]
    assert item["content"][0]["text"] == "text" and item["status"] == "incomplete"
    assert ends == [shown], "told once, when nothing changes any more"
    assert shown["usage"]["input_tokens"] == 2


@pytest.mark.parametrize(
    ("arguments", "reason", "is_made"),
    [
        ('{"days": 11}', "tool_calls", True),
        ("", "tool_calls", True),
        ('{"days": 1', "length", False),
        ("", "length", False),
        ('{"days": 1', "tool_calls", False),  # a stop string
        ("[11]", "tool_calls", False),
    ],
)
def test_a_conversation_goes_on_from_calls_that_were_made(arguments: str, reason: str, is_made: bool) -> None:
    for text in ("So:", ""):
        items = OutputItems()
        items.push(ChoiceNews(0, text=text, calls=[CallDelta(0, "sky", arguments)], finish_reason=reason))
        (message,) = items.messages()
        assert message.content == text and bool(message.model_extra) == is_made
