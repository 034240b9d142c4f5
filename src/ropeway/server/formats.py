"""The JSON of a choice, in completions and in chat, whole and in chunks, and vLLM's fields of the prompt, which are the
choice's in completions and stand beside the choices in chat. Knows no streams, sockets or engine.
"""

from __future__ import annotations

import secrets

from ropeway.server.choices import ChoiceNews, Wishes
from ropeway.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from ropeway.text.tokenizer import Tokenizer
from ropeway.text.tool_calls import CallDelta


class CompletionFormat:
    """The JSON of /v1/completions."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def choice(self, news: ChoiceNews, wishes: Wishes) -> dict[str, object]:
        """A choice of a whole answer."""
        choice: dict[str, object] = {"index": news.number, "text": news.text}
        choice["logprobs"] = completion_logprobs(self._tokenizer, news.scored) if wishes.logprobs else None
        choice["finish_reason"] = news.finish_reason
        return {**choice, **_token_fields(news, wishes), **_prompt_fields(self._tokenizer, news, wishes)}

    def chunk_choice(self, news: ChoiceNews, wishes: Wishes) -> dict[str, object]:
        """A choice of a chunk."""
        return self.choice(news, wishes)

    def beside(self, news: ChoiceNews, wishes: Wishes) -> dict[str, object]:
        """What a choice brings to the answer itself, or to its chunk."""
        return {}

    @staticmethod
    def first_choice(number: int) -> dict[str, object] | None:
        return None

    @staticmethod
    def chunk_parts(number: int) -> tuple[bytes, bytes]:
        """What stands before the text and between the text and the finish reason of a chunk's choice."""
        return b'{"index":%d,"text":' % number, b',"logprobs":null,"finish_reason":'


class ChatFormat:
    """The JSON of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def choice(self, news: ChoiceNews, wishes: Wishes) -> dict[str, object]:
        """A choice of a whole answer."""
        content = news.text if news.text or not news.calls else None
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if wishes.shape.starts_thinking is not None:
            message["reasoning_content"] = news.reasoning or None
        if news.calls:
            message["tool_calls"] = [_call(call) for call in news.calls]
        return self._with_rest({"index": news.number, "message": message}, news, wishes)

    def chunk_choice(self, news: ChoiceNews, wishes: Wishes) -> dict[str, object]:
        """A choice of a chunk."""
        delta: dict[str, object] = {}
        if news.text or not (news.reasoning or news.calls):
            delta["content"] = news.text
        if news.reasoning:
            delta["reasoning_content"] = news.reasoning
        if news.calls:
            delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in news.calls]
        return self._with_rest({"index": news.number, "delta": delta}, news, wishes)

    def _with_rest(self, choice: dict[str, object], news: ChoiceNews, wishes: Wishes) -> dict[str, object]:
        choice["logprobs"] = chat_logprobs(self._tokenizer, news.scored) if wishes.logprobs else None
        choice["finish_reason"] = news.finish_reason
        return {**choice, **_token_fields(news, wishes)}

    def beside(self, news: ChoiceNews, wishes: Wishes) -> dict[str, object]:
        """What a choice brings to the answer itself, or to its chunk: the first one, the prompt's fields."""
        return {} if news.number else _prompt_fields(self._tokenizer, news, wishes)

    @staticmethod
    def first_choice(number: int) -> dict[str, object] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    @staticmethod
    def chunk_parts(number: int) -> tuple[bytes, bytes]:
        return b'{"index":%d,"delta":{"content":' % number, b'},"logprobs":null,"finish_reason":'


Format = CompletionFormat | ChatFormat


def _call(call: CallDelta) -> dict[str, object]:
    """A call, or what is new of it: its id, type and name come with the first news."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _token_fields(news: ChoiceNews, wishes: Wishes) -> dict[str, object]:
    """vLLM's field of a choice."""
    return {"token_ids": news.token_ids} if wishes.token_ids else {}


def _prompt_fields(tokenizer: Tokenizer, news: ChoiceNews, wishes: Wishes) -> dict[str, object]:
    """vLLM's fields of the prompt, which come once."""
    fields: dict[str, object] = {}
    if wishes.token_ids and news.prompt_token_ids is not None:
        fields["prompt_token_ids"] = news.prompt_token_ids
    if wishes.prompt_logprobs and news.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(tokenizer, news.prompt_logprobs)
    return fields
