"""One stream of tokens being generated, as scheduling sees it: counts and block ids.

It holds token values only of its last block, until that is full and has a hash.
Only the scheduler and its KV manager change a sequence.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from ropeway.core.params import FinishReason, Request
from ropeway.core.prefix_index import NOTHING_CACHED, PrefixMatch


class SequenceState(Enum):
    """Where a sequence is. It holds blocks in RUNNING and RETAINED, and in no other state."""

    WAITING = "waiting"  # never ran
    RUNNING = "running"
    PREEMPTED = "preempted"  # ran, lost its blocks, waits to be recomputed
    RETAINED = "retained"  # finished; its blocks stay until its static batch ends
    FINISHED = "finished"


class WaitingReason(Enum):
    """Why a sequence that waits does not board."""

    POLICY = "policy"  # others are ahead of it in line, it was preempted for one, or its request has its share already
    CAPACITY = "capacity"  # the memory it needs, or a place in the batch, is not free
    BUDGET = "budget"  # the step holds no more tokens
    DEFERRED = "deferred"  # for its own good: another computes what it will share


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the n sequences of a request.

    num_computed_tokens chases num_tokens; a plan advances the first, a sampled token the second (a decode's step both):

        0 ── num_computed_tokens ── num_tokens ── num_slots      num_computed <= num_tokens
             keys and values held   known         cache slots    num_computed <= num_slots == block_size x blocks

    sequence_id: ascends with arrival, never reused. index: within the request, 0..n-1.
    max_num_tokens: those it has when it ends by length.
    num_tokens: known tokens, the prompt and what was generated.
    num_computed_tokens: leading tokens whose keys and values are in the cache; of a prompt, or will be after the step
    in flight.
    num_prefill_tokens: tokens known when it was last admitted, or will be; below them it prefills, then it decodes.
    num_recompute_tokens: positions below this were computed before, and lost by preemption.
    num_slots: cache slots its blocks hold. block_ids: one block table per cache group. is_announced: it was in a plan.
    arrival_s, joined_s, first_token_s: when it was added, first joined the line, and got its first token, on the clock
    of whoever drives the scheduler.
    rank: its place in an order that never changes, given once by its policy. waiting_reason: while it waits.
    num_cached_tokens: of its prompt, how many the prefix cache held when it first boarded.
    block_hashes: of its full blocks, as far as known and, behind the prompt, computed; kept when it is preempted.
    tail_token_ids: the known tokens after those. num_tokens_to_seal: with so many tokens known, the next block has been
    computed; 0 until the prompt was hashed. (Without a prefix cache none of these is kept.)
    num_tokens_to_attend: while it decodes, with so many tokens known a block is full or needed, or it ends.
    num_published_blocks: leading blocks of its table that others may share.
    match: what it would find in the prefix cache, as of when that was asked; nothing once it has boarded.
    """

    sequence_id: int
    request: Request
    index: int
    arrival_s: float = 0.0
    request_id: str = field(init=False)
    joined_s: float = field(init=False, default=0.0)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)
    num_tokens_to_attend: int = field(init=False, default=0)
    # Not a list: that holds objects from all over the memory, which cost a miss each when they are hashed.
    tail_token_ids: array[int] = field(init=False, default_factory=lambda: array("i"))
    num_cached_tokens: int = field(init=False, default=0)
    rank: tuple[float, int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    num_prefill_tokens: int = field(init=False)
    num_recompute_tokens: int = field(init=False, default=0)
    num_slots: int = field(init=False, default=0)
    block_ids: tuple[list[int], ...] = field(init=False, default=())
    is_announced: bool = field(init=False, default=False)
    num_preemptions: int = field(init=False, default=0)
    first_token_s: float | None = field(init=False, default=None)
    state: SequenceState = field(init=False, default=SequenceState.WAITING)
    waiting_reason: WaitingReason = field(init=False, default=WaitingReason.POLICY)
    finish_reason: FinishReason | None = field(init=False, default=None)
    num_tokens_to_seal: int = field(init=False, default=0)
    block_hashes: list[bytes] = field(init=False, default_factory=list)
    num_published_blocks: int = field(init=False, default=0)
    match: PrefixMatch = field(init=False, default=NOTHING_CACHED)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.rank = (0.0, self.sequence_id)
        self.num_prompt_tokens = self.num_tokens = self.num_prefill_tokens = len(self.request.prompt_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.request.max_tokens

    @property
    def num_generated_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def may_stop(self) -> bool:
        """Whether the last token, as an id that ends the sequence, does so: only after min_tokens others.

        The sampler masks such ids before that.
        """
        return self.num_tokens > self.num_prompt_tokens + self.request.params.min_tokens
