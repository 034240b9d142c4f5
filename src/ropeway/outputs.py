"""Answers: engine events and detokenized text put together. Knows nothing of threads, HTTP or clocks.

`Assembler` follows one request: token events go in, `Delta`s come out. It is the text side of stop strings: it finds
them, cuts text and tokens at the match, and says when the engine has to be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.core.params import FinishReason, Request
from ropeway.core.plan import SequenceEvent
from ropeway.text.detokenizer import Detokenizer
from ropeway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence. `token_ids` include the token that ended it, where one did; `text` does not."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. `prompt` is None where token ids were given. `seed` is the one used, drawn if none
    was given.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to one sequence. is_stopped_by_text: a stop string ended it, and the engine does not know
    yet.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    is_stopped_by_text: bool = False


class Assembler:
    """Turns the events of one request into text. Feed every event to `push`, in order."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        stop: Sequence[str] = tuple(params.stop)
        self.request = request
        self._detokenizers = [Detokenizer(tokenizer, stop=stop, min_tokens=params.min_tokens) for _ in range(params.n)]
        self._num_tokens = [0] * params.n
        self._is_finished = [False] * params.n
        self.num_unfinished = params.n

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the answer so far, all sequences together, counted through a stop string's match."""
        return sum(self._num_tokens)

    def push(self, event: SequenceEvent) -> Delta | None:
        """What the event adds; None where a stop string had ended the sequence already, or nothing changed."""
        index = event.index
        if self._is_finished[index]:
            return None
        detokenizer = self._detokenizers[index]
        token_ids = event.token_ids
        reason = event.finish_reason
        # A token that ends the sequence is part of the count but not of the text.
        text = detokenizer.push(token_ids[:-1] if reason == "stop" else token_ids)
        if detokenizer.is_stopped:
            token_ids = token_ids[: detokenizer.num_tokens - self._num_tokens[index]]
            return self._finish(index, text, token_ids, "stop", is_stopped_by_text=reason is None)
        if reason is not None:
            text += detokenizer.finish()
            # A character cut short by the end reads as U+FFFD, and that may complete a stop string.
            return self._finish(index, text, token_ids, "stop" if detokenizer.is_stopped else reason)
        self._num_tokens[index] += len(token_ids)
        return Delta(event.request_id, index, text, token_ids, None)

    def _finish(
        self,
        index: int,
        text: str,
        token_ids: tuple[int, ...],
        reason: FinishReason,
        *,
        is_stopped_by_text: bool = False,
    ) -> Delta:
        self._num_tokens[index] += len(token_ids)
        self._is_finished[index] = True
        self.num_unfinished -= 1
        return Delta(self.request.request_id, index, text, token_ids, reason, is_stopped_by_text)


class Transcript:
    """Adds up the deltas of one request into cumulative `RequestOutput`s."""

    def __init__(self, request: Request, prompt: str | None) -> None:
        self._request = request
        self._prompt = prompt
        self._texts: list[list[str]] = [[] for _ in range(request.params.n)]
        self._token_ids: list[list[int]] = [[] for _ in range(request.params.n)]
        self._reasons: list[FinishReason | None] = [None] * request.params.n

    def add(self, delta: Delta) -> None:
        if delta.text:
            self._texts[delta.index].append(delta.text)
        self._token_ids[delta.index].extend(delta.token_ids)
        self._reasons[delta.index] = delta.finish_reason

    def output(self) -> RequestOutput:
        """Everything so far."""
        columns = zip(self._texts, self._token_ids, self._reasons, strict=True)
        return self._wrap(
            [
                CompletionOutput(index, "".join(texts), list(token_ids), reason)
                for index, (texts, token_ids, reason) in enumerate(columns)
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
            request.request_id, self._prompt, list(request.prompt_token_ids), outputs, finished, request.seed
        )
