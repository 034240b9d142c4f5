"""From deltas of requests to news of choices, the same for streams and whole answers.

A whole answer is the sum of its news, so it cannot differ from the stream. Knows no JSON, HTTP or engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, field

from ropeway.core.params import FinishReason, Request
from ropeway.core.plan import TokenLogprobs
from ropeway.outputs import Delta
from ropeway.text.reasoning import ReasoningSplitter
from ropeway.text.tokenizer import Tokenizer
from ropeway.text.tool_calls import CallDelta, ToolCallParser, ToolFormat


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One entry of a choice's log-probabilities. logprobs: None where nothing precedes the token.
    text_offset: characters of the choice's text before it.
    """

    token_id: int
    text_offset: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class ChoiceNews:
    """What is new of one choice. Whatever was not asked for stays empty; the prompt's fields come once, with the first
    news.
    """

    number: int
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    finish_reason: FinishReason | str | None = None
    scored: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def is_worth_telling(self) -> bool:
        return bool(
            self.text
            or self.reasoning
            or self.calls
            or self.finish_reason
            or self.scored
            or self.token_ids
            or self.prompt_token_ids is not None
        )

    def add(self, later: ChoiceNews) -> None:
        """Takes in what came later of the same choice."""
        self.text += later.text
        self.reasoning += later.reasoning
        for call in later.calls:
            self._add_call(call)
        self.finish_reason = later.finish_reason or self.finish_reason
        self.scored += later.scored
        self.token_ids += later.token_ids
        if later.prompt_token_ids is not None:
            self.prompt_token_ids, self.prompt_logprobs = later.prompt_token_ids, later.prompt_logprobs

    def _add_call(self, call: CallDelta) -> None:
        if call.name is not None:
            self.calls.append(CallDelta(call.index, call.name))
        self.calls[call.index].arguments += call.arguments


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """How the text of an answer is to be read. tool_format: calls of `tool_names` are looked for; is_either: a grammar
    makes it calls or content, never both; is_named: one function was asked for by name.
    starts_thinking: None where the model does not think aloud, else whether the prompt has opened the reasoning.
    """

    tool_format: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    is_either: bool = False
    is_parallel: bool = True
    is_named: bool = False
    starts_thinking: bool | None = None

    @property
    def is_plain(self) -> bool:
        return self.tool_format is None and self.starts_thinking is None


class AnswerReader:
    """Reads one answer: reasoning, content and calls, as it arrives."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._splitter = (
            None if shape.starts_thinking is None else ReasoningSplitter(starts_inside=shape.starts_thinking)
        )
        self._parser = None
        if shape.tool_format is not None:
            self._parser = ToolCallParser(
                shape.tool_format, shape.tool_names, is_parallel=shape.is_parallel, is_either=shape.is_either
            )
        self._has_calls = False

    def read(self, news: ChoiceNews) -> None:
        """Replaces the text of `news` by what it holds."""
        text, is_last = news.text, news.finish_reason is not None
        if self._splitter is not None:
            news.reasoning, text = self._splitter.push(text)
            if is_last:
                reasoning, rest = self._splitter.finish()
                news.reasoning, text = news.reasoning + reasoning, text + rest
        if self._parser is not None:
            found = [self._parser.push(text)] + ([self._parser.finish()] if is_last else [])
            text = "".join(each.content for each in found)
            news.calls = [call for each in found for call in each.calls]
            self._has_calls = self._has_calls or bool(news.calls)
        news.text = text
        if news.finish_reason == "stop" and self._has_calls and not self._shape.is_named:
            news.finish_reason = "tool_calls"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a body asks for beside text. echo: of each request, the text of its prompt, to begin every choice with."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    echo: Mapping[str, str] = field(default_factory=dict)
    shape: AnswerShape = AnswerShape()

    @property
    def is_text_only(self) -> bool:
        return self.shape.is_plain and not (self.logprobs or self.prompt_logprobs or self.token_ids or self.echo)


class TokenOffsets:
    """Where each token begins in the text of all of them: an unfinished character begins no later token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def next(self, token_id: int) -> int:
        """Characters before this token, which comes next."""
        offset = self._num_characters
        if token_id not in self._hidden:
            self._num_characters += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


class RequestChoices:
    """The choices of one request: feed its deltas to `push`, in order.

    first_number: of its first choice. News wait until the whole prompt is scored, where somebody wants its scores.
    """

    def __init__(self, request: Request, wishes: Wishes, tokenizer: Tokenizer, first_number: int) -> None:
        n, skips_special = request.params.n, request.params.skip_special_tokens
        self._request = request
        self._wishes = wishes
        self._first_number = first_number
        self._is_begun = [False] * n
        self._offsets = [TokenOffsets(tokenizer, skip_special=skips_special) for _ in range(n)]
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._held: list[Delta] = []
        self._readers = [None if wishes.shape.is_plain else AnswerReader(wishes.shape) for _ in range(n)]

    def push(self, delta: Delta) -> list[ChoiceNews]:
        """The news that a delta brings; some of them may have waited."""
        if self._request.params.prompt_logprobs is None:
            return [self._news(delta)]
        self._prompt_logprobs += delta.prompt_logprobs
        self._held.append(delta)
        # A sequence that was aborted brings no more scores.
        if len(self._prompt_logprobs) < len(self._request.prompt_token_ids) and not _is_cut(delta):
            return []
        held, self._held = self._held, []
        return [self._news(each) for each in held if each.token_ids or each.finish_reason is not None]

    def _news(self, delta: Delta) -> ChoiceNews:
        wishes, index = self._wishes, delta.index
        news = ChoiceNews(self._first_number + index, finish_reason=delta.finish_reason)
        if not self._is_begun[index]:
            self._is_begun[index] = True
            self._begin(news, index)
        news.text += delta.text
        reader = self._readers[index]
        if reader is not None:
            reader.read(news)
        if wishes.logprobs:
            news.scored += [
                ScoredToken(each.token_id, self._offsets[index].next(each.token_id), each) for each in delta.logprobs
            ]
        if wishes.token_ids:
            news.token_ids += delta.token_ids
        return news

    def _begin(self, news: ChoiceNews, index: int) -> None:
        """What a choice begins with: its prompt, as far as it is wanted."""
        wishes, prompt_ids = self._wishes, self._request.prompt_token_ids
        if wishes.token_ids:
            news.prompt_token_ids = list(prompt_ids)
        if wishes.prompt_logprobs:
            news.prompt_token_ids = list(prompt_ids)
            news.prompt_logprobs = list(self._prompt_logprobs)
        if not wishes.echo:
            return
        news.text = wishes.echo[self._request.request_id]
        if wishes.logprobs:
            offsets = self._offsets[index]
            news.scored = [
                ScoredToken(token_id, offsets.next(token_id), logprobs)
                for token_id, logprobs in zip(prompt_ids, self._prompt_logprobs, strict=False)
            ]


def _is_cut(delta: Delta) -> bool:
    return delta.finish_reason in ("abort", "error")
