"""From deltas of requests to news of choices, the same for streams and whole answers.

A whole answer is the sum of its news, so it cannot differ from the stream. Knows no JSON, HTTP or engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ropeway.core.params import FinishReason, Request
from ropeway.core.plan import TokenLogprobs
from ropeway.outputs import Delta
from ropeway.text.tokenizer import Tokenizer


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
    finish_reason: FinishReason | str | None = None
    scored: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def is_worth_telling(self) -> bool:
        return bool(
            self.text or self.finish_reason or self.scored or self.token_ids or self.prompt_token_ids is not None
        )

    def add(self, later: ChoiceNews) -> None:
        """Takes in what came later of the same choice."""
        self.text += later.text
        self.finish_reason = later.finish_reason or self.finish_reason
        self.scored += later.scored
        self.token_ids += later.token_ids
        if later.prompt_token_ids is not None:
            self.prompt_token_ids, self.prompt_logprobs = later.prompt_token_ids, later.prompt_logprobs


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a body asks for beside text. echo: of each request, the text of its prompt, to begin every choice with."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    echo: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_text_only(self) -> bool:
        return not (self.logprobs or self.prompt_logprobs or self.token_ids or self.echo)


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


def sum_of(news: Sequence[ChoiceNews], number: int) -> ChoiceNews:
    """Everything that was told of one choice."""
    total = ChoiceNews(number)
    for each in news:
        total.add(each)
    return total
