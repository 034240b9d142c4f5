"""The messages between scheduler, runner and engine: plain data in columns. Owns no behaviour beyond counting.

One row per scheduled sequence; a plan never carries token values, so it can be logged, replayed and sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ropeway.core.params import FinishReason, Timeout


class BlockGrants(NamedTuple):
    """Blocks newly granted to the rows of a plan, for one cache group.

    block_ids[indptr[s]:indptr[s+1]] are appended, in order, to row s's block table. len(indptr) == S + 1.
    """

    indptr: tuple[int, ...]
    block_ids: tuple[int, ...]


class BlockCopies(NamedTuple):
    """Blocks of one cache group to copy before the forward pass: source_ids[i] to destination_ids[i], in order."""

    source_ids: tuple[int, ...]
    destination_ids: tuple[int, ...]


class LayerSlice(NamedTuple):
    """Part `index` of `count` parts of the model's layers, as equal as can be."""

    index: int  # type: ignore[assignment]  # of the slice; nobody asks this tuple for an index
    count: int  # type: ignore[assignment]

    def share(self, num_layers: int) -> float:
        """Its part of all num_layers >= count."""
        return ((self.index + 1) * num_layers // self.count - self.index * num_layers // self.count) / num_layers

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


class StepPlan(NamedTuple):
    """What one step computes. S rows, decodes first.

    sequence_ids[S]: which sequence each row is; no sequence has two rows.
    starts[S]: num_computed_tokens before the step: the position of the row's first token.
    num_tokens[S]: tokens the row computes, at positions starts[s] .. starts[s] + num_tokens[s] - 1.
    is_sampled[S]: the row reaches the sequence's last known token, so its logits are sampled.
    grants: one per cache group.
    preempted_ids: lost every block since the previous plan; the runner clears their block rows, keeps their tokens.
    finished_ids: ended since the previous plan; the runner forgets them.
    copies: one per cache group, or none at all.
    layer_slice: of the layers, that the last row passes in this step; all of them where it is None. Every slice of the
    row comes, in order, in steps that follow one another; with the last its tokens are computed. Where another row
    comes instead, the slices before are dropped.

    The first row of a sequence that boards starts behind what the prefix cache holds of it, and is granted its whole
    block table, shared blocks too.

    A token sampled by row s takes position starts[s] + num_tokens[s]; where the runner has one there (padding rows of a
    static batch), it is the same. The runner clears and forgets before it applies grants; after a failed step its
    preempted_ids and finished_ids come again, and a sequence the runner does not know may be named: both are harmless.
    """

    step_id: int
    sequence_ids: tuple[int, ...]
    starts: tuple[int, ...]
    num_tokens: tuple[int, ...]
    is_sampled: tuple[bool, ...]
    grants: tuple[BlockGrants, ...]
    preempted_ids: tuple[int, ...] = ()
    finished_ids: tuple[int, ...] = ()
    copies: tuple[BlockCopies, ...] = ()
    layer_slice: LayerSlice | None = None

    @property
    def num_rows(self) -> int:
        return len(self.sequence_ids)

    @property
    def total_num_tokens(self) -> int:
        return sum(self.num_tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the raw logits.

    logprob, rank (1 is the likeliest): of token_id, the token there. top_ids, top_logprobs: the likeliest ones, in
    order.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepResult(NamedTuple):
    """What a step sampled: token_ids[i] continues sequence_ids[i]. The rows with is_sampled, in plan order.

    failed_sequence_ids: sampled rows that had no token to draw (their logits hold a NaN, or every token is masked).
    They are not in sequence_ids, and each ends with finish_reason `error`.
    stopped_sequence_ids: those whose token completes their grammar; they end as `stop`, the token a part of the text.
    logprobs: sequence id -> of its token, for those that ask. prompt_logprobs: sequence id -> of prompt tokens that
    this step scored, in order; across steps each position but the first comes once. None: nobody asked.
    """

    step_id: int
    sequence_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    failed_sequence_ids: tuple[int, ...] = ()
    stopped_sequence_ids: tuple[int, ...] = ()
    logprobs: dict[int, TokenLogprobs] | None = None
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] | None = None


class SequenceEvent:
    """News of one sequence. Exactly one event per sequence has a finish_reason, and it is the last.

    Written out, because a step makes one per running sequence: what `dataclass` generates is not compiled.

    index: of the sequence within its request (0..n-1). token_ids: newly generated, in order; the stop token, where one
    ended the sequence, is included. num_tokens in a `stop` by text is settled by the text side. num_cached_tokens: of
    the prompt, how many the prefix cache held when the sequence first boarded.
    timeout: which of its limits ended it, where one did; then finish_reason is `error`.
    logprobs: of token_ids, for a request that asks. prompt_logprobs: the next of the prompt's, from its second token.
    """

    __slots__ = (
        "request_id",
        "index",
        "token_ids",
        "finish_reason",
        "num_cached_tokens",
        "logprobs",
        "prompt_logprobs",
        "timeout",
    )

    def __init__(
        self,
        request_id: str,
        index: int,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None = None,
        num_cached_tokens: int = 0,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
        timeout: Timeout | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        self.num_cached_tokens = num_cached_tokens
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.timeout = timeout

    def _values(self) -> tuple[object, ...]:
        return (
            self.request_id,
            self.index,
            self.token_ids,
            self.finish_reason,
            self.num_cached_tokens,
            self.logprobs,
            self.prompt_logprobs,
            self.timeout,
        )

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, SequenceEvent) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"SequenceEvent{self._values()!r}"
