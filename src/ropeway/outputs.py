"""Answers: engine events and detokenized text put together. Knows nothing of threads, HTTP or clocks.

`Assembler` follows one request: token events go in, `Delta`s come out. It is the text side of stop strings: it finds
them, cuts text and tokens at the match, and says when the engine has to be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.core.params import FinishReason, Request
from ropeway.core.plan import SequenceEvent, TokenLogprobs
from ropeway.text.detokenizer import Detokenizer
from ropeway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence. `token_ids` include the token that ended it, where one did; `text` does not.
    `logprobs`: one of each token, where asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. `prompt` is None where token ids were given. `seed` is the one used, drawn if none
    was given. `prompt_logprobs`: one of each prompt token, None for the first, where asked for. `num_cached_tokens`: of
    the prompt, how many the prefix cache held for its first sequence.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class Delta:
    """What one event adds to one sequence; nobody changes it. `frozen` would make it by a call for every field, and
    one is made for every token.

    is_stopped_by_text: a stop string ended it, and the engine does not know
    yet. logprobs: of token_ids, and prompt_logprobs: the next of the prompt's, where asked for. num_cached_tokens: of
    the prompt, how many the prefix cache held for this sequence. matched_stop: the stop string that ended it.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    is_stopped_by_text: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    matched_stop: str | None = None


class Assembler:
    """Turns the events of one request into text. Feed every event to `push`, in order.

    It is fetched from memory at every token of its request, as is what it holds: the model has driven it out of the
    caches by then. Hence few and small objects, here and wherever else a token passes.
    """

    __slots__ = ("_detokenizers", "_num_ended_tokens", "_only_reads", "num_unfinished", "request")

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        stop: Sequence[str] = tuple(params.stop)
        self.request = request
        self._only_reads = request.max_tokens == 0
        # None for a sequence that has ended.
        self._detokenizers: list[Detokenizer | None] = [
            Detokenizer(
                tokenizer,
                stop=stop,
                min_tokens=params.min_tokens,
                skip_special=params.skip_special_tokens,
                shows_stop=params.include_stop_str_in_output,
            )
            for _ in range(params.n)
        ]
        self._num_ended_tokens = 0
        self.num_unfinished = params.n

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the answer so far, all sequences together, counted through a stop string's match."""
        return self._num_ended_tokens + sum(each.num_tokens for each in self._detokenizers if each is not None)

    def push(self, event: SequenceEvent) -> Delta | None:
        """What the event adds; None where a stop string had ended the sequence already, or nothing changed."""
        index = event.index
        detokenizer = self._detokenizers[index]
        if detokenizer is None:
            return None
        if event.prompt_logprobs is not None:
            return Delta(event.request_id, index, "", (), None, prompt_logprobs=event.prompt_logprobs)
        token_ids = event.token_ids
        reason = event.finish_reason
        if self._only_reads and token_ids:  # the prompt has been read, and that was all that was asked
            return self._finish(Delta(event.request_id, index, "", (), "length"), 0)
        num_before = detokenizer.num_tokens
        text = detokenizer.push(token_ids[:-1] if reason == "stop" and self._ends_unseen(token_ids) else token_ids)
        logprobs = event.logprobs or ()
        if detokenizer.matched_stop is not None:
            token_ids = token_ids[: detokenizer.num_tokens - num_before]
            logprobs, is_news = logprobs[: len(token_ids)], reason is None
            return self._finish(
                Delta(
                    event.request_id,
                    index,
                    text,
                    token_ids,
                    "stop",
                    is_stopped_by_text=is_news,
                    logprobs=logprobs,
                    num_cached_tokens=event.num_cached_tokens,
                    matched_stop=detokenizer.matched_stop,
                ),
                num_before,
            )
        if reason is not None:
            text += detokenizer.finish()
            # A character cut short by the end reads as U+FFFD, and that may complete a stop string.
            reason = "stop" if detokenizer.is_stopped else reason
            return self._finish(
                Delta(
                    event.request_id,
                    index,
                    text,
                    token_ids,
                    reason,
                    logprobs=logprobs,
                    num_cached_tokens=event.num_cached_tokens,
                    matched_stop=detokenizer.matched_stop,
                ),
                num_before,
            )
        return Delta(event.request_id, index, text, token_ids, None, False, logprobs, (), event.num_cached_tokens)

    def _ends_unseen(self, token_ids: Sequence[int]) -> bool:
        """Whether a sequence stopped by its last token, which is no part of the text then, though it counts."""
        request = self.request
        is_stop_token = bool(token_ids) and token_ids[-1] in request.stop_token_ids
        return is_stop_token and not request.params.include_stop_str_in_output

    def _finish(self, delta: Delta, num_before: int) -> Delta:
        """The last of a sequence, which had so many tokens before."""
        self._num_ended_tokens += num_before + len(delta.token_ids)
        self._detokenizers[delta.index] = None
        self.num_unfinished -= 1
        return delta


class Transcript:
    """Adds up the deltas of one request into cumulative `RequestOutput`s."""

    def __init__(self, request: Request, prompt: str | None) -> None:
        self._request = request
        self._prompt = prompt
        self._texts: list[list[str]] = [[] for _ in range(request.params.n)]
        self._token_ids: list[list[int]] = [[] for _ in range(request.params.n)]
        self._reasons: list[FinishReason | None] = [None] * request.params.n
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(request.params.n)]
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._num_cached_tokens = 0

    def add(self, delta: Delta) -> None:
        if delta.text:
            self._texts[delta.index].append(delta.text)
        self._token_ids[delta.index].extend(delta.token_ids)
        self._reasons[delta.index] = delta.finish_reason
        self._logprobs[delta.index].extend(delta.logprobs)
        self._prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.index == 0:  # the others find what it computed
            self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)

    def output(self) -> RequestOutput:
        """Everything so far."""
        columns = zip(self._texts, self._token_ids, self._reasons, self._logprobs, strict=True)
        is_asked = self._request.params.logprobs is not None
        return self._wrap(
            [
                CompletionOutput(index, "".join(texts), list(token_ids), reason, list(logprobs) if is_asked else None)
                for index, (texts, token_ids, reason, logprobs) in enumerate(columns)
            ]
        )

    def delta_output(self, deltas: Sequence[Delta]) -> RequestOutput:
        """Only what `deltas` added: one output per sequence that has news."""
        news = Transcript(self._request, self._prompt)
        for delta in deltas:
            news.add(delta)
        indices = sorted({delta.index for delta in deltas})
        every = news.output().outputs
        return self._wrap([every[index] for index in indices])

    def _wrap(self, outputs: list[CompletionOutput]) -> RequestOutput:
        finished = all(reason is not None for reason in self._reasons)
        request = self._request
        return RequestOutput(
            request.request_id,
            self._prompt,
            list(request.prompt_token_ids),
            outputs,
            finished,
            request.seed,
            list(self._prompt_logprobs) if request.params.prompt_logprobs is not None else None,
            self._num_cached_tokens,
        )
