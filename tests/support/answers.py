"""What an answer of each endpoint says, whole or streamed, in one form that can be compared. Knows no server.

Ids and times are left out; a stream is added up event by event, as a client would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Said = dict[str, Any]

PROMPT_FIELDS = ("prompt_token_ids", "prompt_logprobs")
_UNSAID = {"id", "call_id", "created", "created_at", "object", "model", "sequence_number"}


def whole_answer(path: str, body: bytes) -> Said:
    """What a whole answer says. path: of its endpoint."""
    found = json.loads(body)
    if "error" in found and found["error"]:
        return {"error": found["error"]}
    if path in ("/v1/messages", "/v1/responses"):
        return _plain(found)
    choices = {choice["index"]: _choice(choice) for choice in found["choices"]}
    return {"choices": choices, "usage": found["usage"], **_of_prompt(found)}


def streamed_answer(path: str, body: bytes) -> Said:
    """What the events of a stream add up to; an error before it began, as a whole answer says it."""
    if body.startswith(b"{"):
        return whole_answer(path, body)
    text = body.decode()
    if path == "/v1/messages":
        return _message(list(_named_events(text)))
    if path == "/v1/responses":
        return _response(list(_named_events(text)))
    datas = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    assert datas[-1] == "[DONE]"
    choices: dict[int, Said] = {}
    usage, beside = None, {}
    for chunk in map(json.loads, datas[:-1]):
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            total = choices.setdefault(choice["index"], {})
            assert not total.get("finish_reason"), "a choice goes on after its end"
            add_up(total, choice)
        usage = chunk.get("usage") or usage
        assert not beside.keys() & _of_prompt(chunk).keys(), "the prompt's fields come once"
        beside |= _of_prompt(chunk)
    return {"choices": {index: _choice(choice) for index, choice in choices.items()}, "usage": usage, **beside}


def _of_prompt(answer: Said) -> Said:
    """What chat says of the prompt beside the choices."""
    return {name: answer[name] for name in PROMPT_FIELDS if name in answer}


def add_up(total: Said, news: Said) -> None:
    """Adds a chunk's choice to what is known of it: texts and lists grow, calls by their index, the rest is set."""
    for name, value in news.items():
        if name == "tool_calls":
            _add_calls(total.setdefault(name, []), value)
        elif isinstance(value, dict) and name in ("delta", "logprobs"):
            held = total.setdefault(name, {})
            if held is None:
                held = total[name] = {}
            add_up(held, value)
        elif isinstance(value, list) and isinstance(total.get(name), list):
            total[name] += value
        elif isinstance(value, str) and isinstance(total.get(name), str) and name != "role":
            total[name] += value
        elif value is not None or name not in total:
            total[name] = value


def _add_calls(total: list[Said], news: list[Said]) -> None:
    for call in news:
        if call["index"] == len(total):
            total.append({**call, "function": dict(call["function"])})
        else:
            total[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def _choice(choice: Said) -> Said:
    said = {**choice, **(choice.get("message") or choice.get("delta") or {})}
    for name in ("message", "delta", "role", "refusal", "index"):
        said.pop(name, None)
    said["text"] = (said.pop("content", None) or "") + (said.get("text") or "")
    calls = [call["function"] for call in said.pop("tool_calls", None) or []]
    if isinstance(said.get("logprobs"), dict):
        said["logprobs"].pop("refusal", None)
    said["reasoning_content"] = said.get("reasoning_content") or ""
    return {**said, "calls": [{"name": call["name"], "arguments": call["arguments"]} for call in calls]}


def _plain(value: Any) -> Any:
    """The value without ids and times, at any depth."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if key not in _UNSAID}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _named_events(text: str) -> Iterator[Said]:
    for block in text.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


def _message(events: list[Said]) -> Said:
    """Anthropic's events, added up as its clients do."""
    events = [event for event in events if event["type"] != "ping"]
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop", events
    message = events[0]["message"]
    inputs: dict[int, str] = {}
    open_block: int | None = None
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None and event["index"] == len(message["content"])
                open_block = event["index"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case other:
                raise AssertionError(f"an event {other}")
    assert open_block is None
    for index, text in inputs.items():
        try:
            message["content"][index]["input"] = json.loads(text)
        except ValueError:
            message["content"][index]["input"] = {}  # cut off by max_tokens
    return _plain(message)  # type: ignore[no-any-return]


def _response(events: list[Said]) -> Said:
    """OpenAI's events of a response: its last state, which its deltas must add up to."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert events[-1]["type"] == f"response.{final['status']}", events[-1]["type"]
    grown: dict[int, str] = {}
    for event in events:
        if event["type"] in ("response.output_text.delta", "response.function_call_arguments.delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    for index, item in enumerate(final["output"]):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert grown.get(index, "") == text
    return _plain(final)  # type: ignore[no-any-return]
